"""A rank that is killed while it loads, saves or runs: the others fail soon, with the reason."""

from __future__ import annotations

import os
import signal
import threading
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

MAX_SECONDS = 15.0


class Kills:
    """Replaces a function: records the time and kills the process. All processes share the clock."""

    def __init__(self, note: str) -> None:
        self.note = Path(note)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.note.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def seconds_ago(self) -> float:
        return time.monotonic() - float(self.note.read_text())


def while_loading(folder: str, note: str) -> float:
    kills = Kills(note)
    if dist.get_rank() == 1:
        materialize.load_parameters = kills  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"rank 1 .*ended|onnection"):
        parallel(folder)
    return kills.seconds_ago()


def while_saving(folder: str, target: str, note: str) -> float:
    kills = Kills(note)
    model, _ = parallel(folder)
    model.save_pretrained(target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    if dist.get_rank() == 1:
        saving.gather = kills  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"rank 1 .*ended|onnection"):
        model.save_pretrained(target)
    return kills.seconds_ago()


def while_running(folder: str, note: str, shared_memory: str) -> float:
    """At any point of its forward passes."""
    os.environ["PARAXIS_SHARED_MEMORY"] = shared_memory
    kills = Kills(note)
    model, _ = parallel(folder)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        model(ids)
        if dist.get_rank() == 1:
            threading.Timer(0.3, kills).start()
        with pytest.raises(RuntimeError, match=r"rank 1 .*ended|onnection"):
            for _ in range(1_000_000):
                model(ids)
    return kills.seconds_ago()


def test_a_rank_killed_while_loading(tmp_path: Path) -> None:
    first, second = spawn_ranks(2, while_loading, save("gpt2", tmp_path / "model"), str(tmp_path / "killed"))
    assert second.exit_code == -signal.SIGKILL
    assert first.error is None and first.value < MAX_SECONDS, first


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_a_rank_killed_while_running(tmp_path: Path, shared_memory: str) -> None:
    folder, note = save("gpt2", tmp_path / "model"), str(tmp_path / "killed")
    first, second = spawn_ranks(2, while_running, folder, note, shared_memory)
    assert second.exit_code == -signal.SIGKILL
    assert first.error is None and first.value < MAX_SECONDS, first


def test_a_rank_killed_while_saving(tmp_path: Path) -> None:
    """The previous checkpoint is unchanged."""
    from transformers import AutoModelForCausalLM

    folder, target = save("gpt2", tmp_path / "model"), tmp_path / "saved"
    first, second = spawn_ranks(2, while_saving, folder, str(target), str(tmp_path / "killed"))
    assert second.exit_code == -signal.SIGKILL
    assert first.error is None and first.value < MAX_SECONDS, first
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, str(target)))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(path.name.startswith(".saving") for path in target.iterdir())
