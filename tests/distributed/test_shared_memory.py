"""Collectives through shared memory: values, chunks, inference mode, and ranks that fail."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import paraxis.distributed as pd
from paraxis.distributed import CollectiveError
from paraxis.distributed import shared_memory as module
from ranks import RankPool, spawn_ranks

Ranks = Callable[[int], RankPool]


def sums(shape: tuple[int, ...], capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """(sum through shared memory, sum by gloo, all-gather through shared memory, whether it was used)"""
    group: Any = dist.group.WORLD
    found = module.shared_memory_of(group)
    if found is not None:
        found.capacity = capacity
    x = torch.randn(shape, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    expected = x.clone()
    dist.all_reduce(expected)
    return pd.all_reduce(x, group), expected, pd.all_gather(x, group, 0), found is not None


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("shape", "capacity"), [((3, 5), 4096), ((3, 5), 64), ((1000,), 64), ((0, 4), 64), ((), 64)])
def test_values_in_one_chunk_and_in_several(ranks: Ranks, world: int, shape: tuple[int, ...], capacity: int) -> None:
    if not shape:
        shape = (1,)
    results = ranks(world).run(sums, shape, capacity)
    for summed, expected, gathered, used in results:
        assert used
        assert torch.allclose(summed, expected, rtol=0, atol=1e-12)
        assert torch.equal(summed, results[0][0]), "the ranks disagree"
        assert gathered.shape == (world * shape[0], *shape[1:]) and torch.equal(gathered, results[0][2])


def in_modes() -> list[torch.Tensor]:
    """The first sum runs in inference mode, the others do not."""
    group: Any = dist.new_group()
    x = torch.ones(4) * (dist.get_rank() + 1)
    with torch.inference_mode():
        first = pd.all_reduce(x.clone(), group).clone()
    with torch.no_grad():
        second = pd.all_reduce(x, group)
    leaf = x.clone().requires_grad_()
    third = pd.differentiable_all_reduce_sum(leaf, group)
    third *= 1  # a caller may write to the result
    gathered = pd.differentiable_all_gather(leaf, group, 0)
    gathered *= 1
    third.sum().backward()
    return [first.clone(), second, third.detach(), leaf.grad]  # type: ignore[list-item]


def test_results_do_not_depend_on_the_mode_of_the_first_call(ranks: Ranks) -> None:
    for first, second, third, gradient in ranks(2).run(in_modes):
        assert torch.equal(first, second) and torch.equal(second, third) and bool((first == 3).all())
        assert bool((gradient == 1).all())


def one_dies() -> float:
    group: Any = dist.group.WORLD
    pd.all_reduce(torch.ones(2), group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(CollectiveError, match=r"rank 0 of 2: all_reduce .* rank 1 \(process \d+\) has ended"):
        pd.all_reduce(torch.ones(2), group)
    return time.monotonic() - started


def test_a_killed_rank_is_reported() -> None:
    results = spawn_ranks(2, one_dies)
    assert results[0].value < 10
    assert results[1].exit_code == -signal.SIGKILL


def different_collectives() -> str:
    group: Any = dist.group.WORLD
    pd.all_reduce(torch.ones(2), group)
    with pytest.raises(CollectiveError) as error:
        if dist.get_rank() == 0:
            pd.all_reduce(torch.ones(8), group)
        else:
            pd.all_gather(torch.ones(2), group)
    return str(error.value)


def test_ranks_in_different_collectives_fail() -> None:
    first, second = (result.value for result in spawn_ranks(2, different_collectives))
    assert "rank 1 is in all_gather of 8 bytes" in first
    assert "rank 0 is in all_reduce of 32 bytes" in second


def disabled_on_one_rank(number: uuid.UUID) -> tuple[bool, float]:
    os.environ["PARAXIS_SHARED_MEMORY"] = "0" if dist.get_rank() == 1 else "1"
    try:
        group: Any = dist.new_group()
        with mock.patch.object(module.uuid, "uuid4", lambda: number):
            return module.shared_memory_of(group) is None, float(pd.all_reduce(torch.ones(1), group))
    finally:
        del os.environ["PARAXIS_SHARED_MEMORY"]


def test_all_ranks_use_it_or_none(ranks: Ranks) -> None:
    number = uuid.uuid4()
    assert ranks(2).run(disabled_on_one_rank, number) == [(True, 2.0)] * 2
    assert not os.path.exists(f"/dev/shm/paraxis-{number.hex}")
