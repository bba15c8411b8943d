"""Dtypes are those that plain transformers loads with: some modules keep more precision than the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models.compare import parallel
from zoo.cases import find


def dtypes(folder: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
    model, _ = parallel(folder, torch_dtype=dtype)
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_as_plain_transformers(ranks: Any, tmp_path: Path) -> None:
    """The bias of a router, a buffer."""
    name, dtype, kept = "deepseek_v3[first_k_dense_replace=1]", torch.bfloat16, "correction_bias"
    model: Any = find(name).make()
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=dtype)
    expected = {n: t.dtype for n, t in (*plain.named_parameters(), *plain.named_buffers())}
    found = ranks(2).run(dtypes, str(tmp_path), dtype)[0]
    assert found == expected
    assert {t for n, t in found.items() if n.endswith(kept)} == {torch.float32} and dtype in found.values()
