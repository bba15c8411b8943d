"""A rank that is killed while weights are loaded or saved: the others end, soon and with a reason."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import parallel
from models.tiny import save

from paraxis.weights import materialize
from paraxis.weights import save as saving
from ranks import spawn_ranks

LIMIT = 15.0


def ends(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def while_loading(folder: str) -> float:
    if dist.get_rank() == 1:
        materialize.load_parameters = ends  # type: ignore[assignment]
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 .*ended|onnection"):
        parallel(folder)
    return time.monotonic() - started


def while_saving(folder: str, target: str) -> float:
    model, _ = parallel(folder)
    model.save_pretrained(target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    if dist.get_rank() == 1:
        saving.gather = ends  # type: ignore[assignment]
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 .*ended|onnection"):
        model.save_pretrained(target)
    return time.monotonic() - started


def test_while_loading(tmp_path: Path) -> None:
    first, second = spawn_ranks(2, while_loading, save("gpt2", tmp_path))
    assert second.exit_code == -signal.SIGKILL
    assert first.value < LIMIT, first


def test_while_saving(tmp_path: Path) -> None:
    """What was saved before is what it was."""
    from transformers import AutoModelForCausalLM

    folder, target = save("gpt2", tmp_path / "model"), tmp_path / "saved"
    first, second = spawn_ranks(2, while_saving, folder, str(target))
    assert second.exit_code == -signal.SIGKILL
    assert first.value < LIMIT, first
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, str(target)))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(path.name.startswith(".saving") for path in target.iterdir())
