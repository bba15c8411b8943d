"""A rank is killed in the middle of a training step: the others stop, and training resumes from the checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.meshes import batches, mean_over_ranks, parallel_on_mesh, rows_of_rank, train_steps

from paraxis import load_state, save_state
from ranks import spawn_ranks

LIMIT = 15.0
"""Seconds in which the other ranks must stop."""


def train(folder: str, target: str, data_parallel: str, first: int, last: int, dies: bool) -> Any:
    """Losses of steps ``first`` to ``last``, with a checkpoint after each.

    If it ``dies``, the last rank is killed in the backward pass of the third step, and the others return the seconds
    until they noticed.
    """
    model, ctx = parallel_on_mesh(folder, 2, 2, data_parallel=data_parallel)
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
                train_steps(model, [rows_of_rank(ids, ctx)], optimizer=optimizer)
            return time.monotonic() - started
        losses += mean_over_ranks(train_steps(model, [rows_of_rank(ids, ctx)], optimizer=optimizer), ctx.groups.dp)
        if target:
            save_state(target, model, optimizer, step=step + 1)
    return losses


@pytest.mark.parametrize("data_parallel", ["shard", pytest.param("replicate", marks=pytest.mark.long)])
def test_other_ranks_stop_and_training_resumes(
    ranks: Any, checkpoints: Any, tmp_path: Path, data_parallel: str
) -> None:
    folder, target = checkpoints("llama"), str(tmp_path / "state")
    uninterrupted = ranks(4).run(train, folder, "", data_parallel, 0, 4, False)[0]
    *others, killed = spawn_ranks(4, train, folder, target, data_parallel, 0, 4, True)
    assert killed.exit_code == -signal.SIGKILL
    for outcome in others:
        assert outcome.error is None and outcome.value < LIMIT, outcome
    for losses in ranks(4).run(train, folder, target, data_parallel, 2, 4, False):
        assert losses == pytest.approx(uninterrupted[2:], abs=1e-6)
