"""Materializing planned parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models.tiny import save
from safetensors.torch import load_file
from torch import nn
from weights.checkpoints import SINGLE, copy, warnings_and_logits

from paraxis.weights.materialize import checksums
from paraxis.weights.meta_init import attach_parameter_meta


def test_check_finite_warns_of_nan(ranks: Any, tmp_path: Path) -> None:
    folder = Path(save("gpt2", tmp_path / "good"))
    norm = "transformer.h.1.ln_1.weight"
    broken = load_file(folder / SINGLE)[norm]
    broken[3] = float("nan")
    bad = copy(folder, tmp_path / "nan", **{norm: broken})
    first, _ = ranks(2).run(warnings_and_logits, bad, check_finite=True)[0]
    assert any(f"NaN or infinity in the weights of {norm}" in text for text in first)
    silent, _ = ranks(2).run(warnings_and_logits, bad)[0]
    assert not any("NaN" in text for text in silent)


def test_checksums_follow_the_values() -> None:
    def sums(change: float) -> dict[str, str]:
        module = nn.Linear(4, 2)
        nn.init.ones_(module.weight)
        nn.init.constant_(module.bias, change)
        return checksums(attach_parameter_meta(module, torch.device("cpu")))

    assert sums(0.0) == sums(0.0) and sums(0.0).keys() == {"weight", "bias"}
    assert sums(0.0)["bias"] != sums(1.0)["bias"] and sums(0.0)["weight"] == sums(1.0)["weight"]
