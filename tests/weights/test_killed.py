"""A rank that is killed while weights are loaded or saved, or in a forward: the others end, soon and with a reason."""

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

LIMIT = 15.0


class Ends:
    """In the place of a function: notes when it was called and ends the process. The clock is one for all processes."""

    def __init__(self, note: str) -> None:
        self.note = Path(note)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.note.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def seconds_ago(self) -> float:
        return time.monotonic() - float(self.note.read_text())


def while_loading(folder: str, note: str) -> float:
    ends = Ends(note)
    if dist.get_rank() == 1:
        materialize.load_parameters = ends  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"rank 1 .*ended|onnection"):
        parallel(folder)
    return ends.seconds_ago()


def while_saving(folder: str, target: str, note: str) -> float:
    ends = Ends(note)
    model, _ = parallel(folder)
    model.save_pretrained(target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    if dist.get_rank() == 1:
        saving.gather = ends  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"rank 1 .*ended|onnection"):
        model.save_pretrained(target)
    return ends.seconds_ago()


def while_running(folder: str, note: str, shared_memory: str) -> float:
    """Wherever in its forwards the rank happens to be."""
    os.environ["PARAXIS_SHARED_MEMORY"] = shared_memory
    ends = Ends(note)
    model, _ = parallel(folder)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        model(ids)
        if dist.get_rank() == 1:
            threading.Timer(0.3, ends).start()
        with pytest.raises(RuntimeError, match=r"rank 1 .*ended|onnection"):
            for _ in range(1_000_000):
                model(ids)
    return ends.seconds_ago()


def test_while_loading(tmp_path: Path) -> None:
    first, second = spawn_ranks(2, while_loading, save("gpt2", tmp_path / "model"), str(tmp_path / "killed"))
    assert second.exit_code == -signal.SIGKILL
    assert first.error is None and first.value < LIMIT, first


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_while_running(tmp_path: Path, shared_memory: str) -> None:
    folder, note = save("gpt2", tmp_path / "model"), str(tmp_path / "killed")
    first, second = spawn_ranks(2, while_running, folder, note, shared_memory)
    assert second.exit_code == -signal.SIGKILL
    assert first.error is None and first.value < LIMIT, first


def test_while_saving(tmp_path: Path) -> None:
    """What was saved before is what it was."""
    from transformers import AutoModelForCausalLM

    folder, target = save("gpt2", tmp_path / "model"), tmp_path / "saved"
    first, second = spawn_ranks(2, while_saving, folder, str(target), str(tmp_path / "killed"))
    assert second.exit_code == -signal.SIGKILL
    assert first.error is None and first.value < LIMIT, first
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, str(target)))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(path.name.startswith(".saving") for path in target.iterdir())
