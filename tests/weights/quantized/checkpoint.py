"""A small quantized checkpoint, and ways to damage it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models.quantized import write
from models.quantized_formats import CASES
from safetensors.torch import load_file, save_file

import paraxis
from paraxis.weights.quantized import stored as stored_module


def damaged(
    folder: Path,
    case: str = "fp8-blocks",
    tensors: Callable[[dict[str, torch.Tensor]], Any] | None = None,
    config: Callable[[dict[str, Any]], Any] | None = None,
    kind: str = "dense",
) -> str:
    """A checkpoint whose tensors or configuration were changed; its folder."""
    each = CASES[case]
    write(kind, folder, each.format, each.config, each.dequantize, **{**each.overrides, "num_hidden_layers": 1})
    if tensors is not None:
        state = load_file(folder / "model.safetensors")
        tensors(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        data = json.loads((folder / "config.json").read_text())
        config(data)
        (folder / "config.json").write_text(json.dumps(data))
    return str(folder)


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The bytes of each box of quantized weights that this process reads inside."""
    found: list[int] = []
    original = stored_module.read_box

    def counted(handle: Any, key: str, index: Any) -> torch.Tensor:
        result = original(handle, key, index)
        found.append(result.nbytes)
        return result

    stored_module.read_box = counted
    try:
        yield found
    finally:
        stored_module.read_box = original


def load(folder: str, **options: Any) -> Any:
    """Load it on the ranks of this test."""
    ctx = paraxis.ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cpu"))
    return paraxis.parallelize_model(folder, ctx, show_progress=False, **options)


def error(folder: str, **options: Any) -> str:
    """What loading it raises."""
    try:
        load(folder, **options)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""
