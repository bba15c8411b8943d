"""A rank that is killed in the middle of a training step: the others stop, and training goes on from the checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import long
from models.meshes import batches, mean_over, mine, on_mesh, steps
from models.tiny import save

from paraxis import load_state, save_state
from ranks import spawn_ranks

LIMIT = 15.0


def trains(folder: str, target: str, data_parallel: str, first: int, last: int, dies: bool) -> Any:
    """Steps ``first`` to ``last``, saved after every one; the last rank may be killed in the backward of the third."""
    model, ctx = on_mesh(folder, 2, 2, data_parallel=data_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if first:
        assert load_state(target, model, optimizer) == {"step": first}
    losses = []
    for step, ids in enumerate(batches(last)):
        if step < first:
            continue
        if dies and step == 2:
            if dist.get_rank() == 3:
                middle = list(model.parameters())[len(list(model.parameters())) // 2]
                middle.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            started = time.monotonic()
            with pytest.raises(RuntimeError, match=r"has ended|onnection|peer"):
                steps(model, [mine(ids, ctx)], optimizer=optimizer)
            return time.monotonic() - started
        losses += mean_over(steps(model, [mine(ids, ctx)], optimizer=optimizer), ctx.groups.dp)
        if target:
            save_state(target, model, optimizer, step=step + 1)
    return losses


@long
@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_the_others_stop_and_training_goes_on(ranks: Any, tmp_path: Path, data_parallel: str) -> None:
    folder, target = save("llama", tmp_path / "model"), str(tmp_path / "state")
    without = ranks(4).run(trains, folder, "", data_parallel, 0, 4, False)[0]
    *others, killed = spawn_ranks(4, trains, folder, target, data_parallel, 0, 4, True)
    assert killed.exit_code == -signal.SIGKILL
    for outcome in others:
        assert outcome.error is None and outcome.value < LIMIT, outcome
    for losses in ranks(4).run(trains, folder, target, data_parallel, 2, 4, False):
        assert losses == pytest.approx(without[2:], abs=1e-6)
