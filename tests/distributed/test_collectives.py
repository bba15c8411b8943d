"""Collectives: values, dtypes, counting, and errors that name collective and rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.values import values_of
from helpers.shards import run_all

import paraxis.distributed as pd
from paraxis.distributed import CollectiveError, count_collectives
from ranks import RankPool, spawn_ranks

Ranks = Callable[[int], RankPool]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8]


def all_collectives(shape: tuple[int, ...], dtype: torch.dtype, dim: int, transpose: bool) -> dict[str, Any]:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = values_of(shape, rank, dtype)
    if transpose:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    before = x.clone()
    results = {
        "all_reduce": pd.all_reduce(x, group),
        "maximum": pd.all_reduce(x, group, op="max"),
        "all_gather": pd.all_gather(x, group, dim),
        "reduce_scatter": pd.reduce_scatter(x, group, dim),
        "broadcast": pd.broadcast(x, group, src=world - 1),
        "split": pd.split(x, group, dim),
    }
    assert torch.equal(x, before)
    return {name: result.clone() for name, result in results.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_results_are_those_of_plain_indexing(ranks: Ranks, world: int) -> None:
    shape = (4, 8, 4)
    cases = [(dtype, 1, False) for dtype in DTYPES] + [(torch.float32, d, t) for d in (0, -1) for t in (0, 1)]
    jobs = ranks(world).run(run_all, all_collectives, [(shape, d, dim, bool(t)) for d, dim, t in cases])
    for case, (dtype, dim, _) in enumerate(cases):
        all_x = [values_of(shape, rank, dtype) for rank in range(world)]
        total = torch.stack(all_x).sum(0).to(dtype)
        for rank, result in enumerate(job[case] for job in jobs):
            expected = {
                "all_reduce": total,
                "maximum": torch.stack(all_x).amax(0),
                "all_gather": torch.cat(all_x, dim),
                "reduce_scatter": total.chunk(world, dim)[rank],
                "broadcast": all_x[-1],
                "split": all_x[rank].chunk(world, dim)[rank],
            }
            assert result.keys() == expected.keys()
            for name, value in expected.items():
                assert result[name].dtype == dtype, name
                assert torch.equal(result[name], value), (name, dtype, dim)


def narrow_dtypes() -> list[torch.Tensor]:
    group = dist.group.WORLD
    flags = torch.tensor([True, True, False]) if dist.get_rank() else torch.tensor([True, False, False])
    either = pd.all_reduce(flags, group)
    eighths = torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)
    raw = either.view(torch.uint8).clone()
    return [either, raw, pd.all_gather(flags, group), pd.all_reduce(eighths, group).float()]


def test_dtypes_that_backends_do_not_have(ranks: Ranks) -> None:
    for either, raw, gathered, eighths in ranks(2).run(narrow_dtypes):
        assert either.tolist() == [True, True, False]
        assert raw.tolist() == [1, 1, 0]  # a bool of two would equal neither True nor False
        assert gathered.tolist() == [True, False, False, True, True, False]
        assert eighths.tolist() == [1.0, 4.0]


def counted() -> tuple[dict[str, int], int, dict[str, int], int]:
    group, x = dist.group.WORLD, torch.ones(4, 2)
    with count_collectives() as outer:
        pd.all_reduce(x, group)
        with count_collectives() as inner:
            pd.all_reduce(x, group)
            pd.all_gather(x, group)
            pd.reduce_scatter(x, group)
            pd.split(x, group)
    pd.all_reduce(x, group)
    return dict(outer.counts), outer.total, dict(inner.counts), inner.bytes


def test_collectives_are_counted_with_their_bytes(ranks: Ranks) -> None:
    for outer, total, inner, size in ranks(2).run(counted):
        assert inner == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1}
        assert outer == {**inner, "all_reduce": 2} and total == 4
        assert size == 32 + 64 + 32


def alone() -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    x = torch.ones(3, requires_grad=True)
    with count_collectives() as counter:
        for function in (pd.all_reduce, pd.all_gather, pd.reduce_scatter, pd.broadcast, pd.split):
            assert function(x, group) is x
    assert counter.total == 0


def test_a_single_rank_does_nothing(ranks: Ranks) -> None:
    ranks(2).run(alone)


def misuse() -> list[str]:
    group, messages = dist.group.WORLD, []
    for function, x in [
        (pd.reduce_scatter, torch.ones(2, 3)),
        (pd.split, torch.ones(2, 3)),
        (pd.all_reduce, torch.ones(2, requires_grad=True)),
    ]:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            function(x, group)
        messages.append(str(caught.value))
    return messages


def test_misuse_is_refused_before_any_communication(ranks: Ranks) -> None:
    for scatter, split, gradient in ranks(2).run(misuse):
        assert "3 is not divisible by 2" in scatter and "reduce_scatter" in scatter
        assert "3 is not divisible by 2" in split
        assert "all_reduce is not differentiable" in gradient


# -- failures -----------------------------------------------------------------------------------------------


def one_does_not_join() -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        return "stayed away"
    with pytest.raises(CollectiveError) as caught:
        pd.all_reduce(torch.ones(2, 8, 64), group)
    assert isinstance(caught.value.__cause__, RuntimeError)
    return str(caught.value)


def test_a_timeout_names_the_collective_and_the_rank(ranks: Ranks) -> None:
    message = ranks(2).run(one_does_not_join)[1]
    assert message.startswith("rank 1 of 2: all_reduce of a float32 tensor of shape (2, 8, 64) failed: ")
    assert "1000ms" in message and "different programs" in message


def one_dies() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    pd.all_gather(torch.ones(2, dtype=torch.bfloat16), dist.group.WORLD, 0)


def test_the_death_of_a_rank_is_reported() -> None:
    survivor = spawn_ranks(2, one_dies, timeout=30.0)[1]
    assert survivor.error == "CollectiveError", survivor.message
    assert "rank 1 of 2: all_gather of a bfloat16 tensor of shape (2,) failed" in survivor.message


def test_one_rank_of_a_fake_group_needs_no_others() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        x = torch.ones(2, 16)
        group = dist.group.WORLD
        assert pd.all_reduce(x, group).shape == (2, 16)
        assert pd.all_gather(x, group).shape == (2, 128)
        assert pd.reduce_scatter(x, group).shape == (2, 2)
        assert pd.broadcast(x, group).shape == (2, 16)
        assert pd.split(x, group).shape == (2, 2)
    finally:
        dist.destroy_process_group()
