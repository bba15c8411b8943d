"""Changed copies of a checkpoint, and the errors of ranks that load them."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models.compare import batch, parallel
from safetensors.torch import load_file, save_file

from paraxis import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def errors_of(folders: list[list[str]]) -> list[str]:
    """The error of this rank for each of these, which may be a different folder on each rank; empty if it loads."""
    found = []
    for folder in folders:
        try:
            parallel(folder[dist.get_rank() % len(folder)])
            found.append("")
        except CheckpointError as error:
            found.append(str(error))
    return found


def copy(folder: Path, target: Path, **changes: Any) -> str:
    """A copy with other tensors; None removes one."""
    shutil.copytree(folder, target)
    tensors = {**load_file(folder / SINGLE), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, target / SINGLE, metadata={"format": "pt"})
    return str(target)


def warnings_and_logits(folder: str, **options: Any) -> tuple[list[str], torch.Tensor]:
    """What this rank warns of while it loads, and what the model computes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = parallel(folder, **options)
    ids, _ = batch(model.config.vocab_size)
    with torch.no_grad():
        return [str(w.message) for w in caught], model(input_ids=ids).logits
