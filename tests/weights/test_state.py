"""The state of a training run, saved by some ranks and resumed by others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import batch, parallel
from models.tiny import save

from paraxis import CheckpointError, load_state, save_state
from ranks import spawn_ranks


def trainer(folder: str) -> tuple[Any, Any, Any]:
    model, _ = parallel(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, labels = batch(model.config.vocab_size)

    def step() -> float:
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return model, optimizer, step


def begins(folder: str, target: str) -> list[float]:
    """Four steps, saved after the first and, replacing that, after the second."""
    model, optimizer, step = trainer(folder)
    step()
    save_state(target, model, optimizer, step=1)
    step()
    save_state(target, model, optimizer, step=2, note=["any", {"plain": "data"}])
    return [step(), step()]


def resumes(folder: str, target: str) -> tuple[list[float], dict[str, Any]]:
    model, optimizer, step = trainer(folder)
    optimizer.param_groups[0]["lr"] = 1.0
    extra = load_state(target, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-2 and isinstance(optimizer.param_groups[0]["betas"], tuple)
    return [step(), step()], extra


@pytest.mark.parametrize("worlds", [(2,), pytest.param((4, 8), marks=pytest.mark.long)])
def test_any_number_of_ranks_resumes(ranks: Any, tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """With packed projections."""
    folder = save("gpt2", tmp_path / "model")
    target = str(tmp_path / "state")
    saved = ranks(4).run(begins, folder, target)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "state"]
    for world in worlds:
        for losses, extra in ranks(world).run(resumes, folder, target):
            assert extra == {"step": 2, "note": ["any", {"plain": "data"}]}
            assert losses == pytest.approx(saved, abs=0 if world == 4 else 1e-5)


def refuses(folder: str, other: str, empty: str, target: str) -> list[str]:
    model, optimizer, _ = trainer(folder)
    save_state(target, model)
    messages = []
    for source, resumed in ((empty, None), (target, optimizer), (target + "x", None)):
        with pytest.raises(CheckpointError) as error:
            load_state(source, model, resumed)
        messages.append(str(error.value))
    with pytest.raises(CheckpointError) as error:
        load_state(target, parallel(other)[0])
    return [*messages, str(error.value)]


def test_other_directories_are_refused(ranks: Any, tmp_path: Path) -> None:
    folder, other = save("llama", tmp_path / "a"), save("gpt2", tmp_path / "b")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__0_0.distcp").write_bytes(b"half of it")
    for half, without, nothing, wrong in ranks(2).run(refuses, folder, other, f"{tmp_path}/half", f"{tmp_path}/state"):
        assert "no complete training state: there is only __0_0.distcp" in half
        assert "saved without an optimizer" in without and "no such directory" in nothing
        assert "not a state of this model; missing: model/transformer" in wrong


def dies(folder: str, target: str) -> float:
    """The last rank is killed while the state is written."""
    from torch.distributed.checkpoint import FileSystemWriter

    model, optimizer, step = trainer(folder)
    step()
    save_state(target, model, optimizer, step=1)
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign,return-value]
    started = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)rank|peer|connection"):
        save_state(target, model, optimizer, step=2)
    return time.monotonic() - started


@pytest.mark.long
def test_a_killed_rank_leaves_the_previous_state(ranks: Any, tmp_path: Path) -> None:
    folder, target = save("gpt2", tmp_path / "model"), str(tmp_path / "state")
    results = spawn_ranks(2, dies, folder, target)
    assert results[0].value < 15 and results[1].exit_code == -signal.SIGKILL
    assert [extra for _, extra in ranks(2).run(resumes, folder, target)] == [{"step": 1}] * 2
