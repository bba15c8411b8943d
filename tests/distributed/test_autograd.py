"""Differentiable collectives: forward and backward are conjugate pairs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from distributed.values import values_of
from helpers.shards import run_all

import paraxis.distributed as pd
from ranks import RankPool

Ranks = Callable[[int], RankPool]

PAIRS = {
    "identity": pd.differentiable_identity,
    "all_reduce": pd.differentiable_all_reduce_sum,
    "all_gather": pd.differentiable_all_gather,
    "scatter": pd.differentiable_scatter,
    "all_gather_reduce_scatter": pd.differentiable_all_gather_reduce_scatter,
    "reduce_scatter": pd.differentiable_reduce_scatter_sum,
}


def apply_pair(name: str, x: torch.Tensor) -> torch.Tensor:
    dims = () if name in ("identity", "all_reduce") else (1,)
    return PAIRS[name](x, dist.group.WORLD, *dims)


def forward_and_backward(name: str, compiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    x = values_of((2, 4, 3), rank).requires_grad_()
    run = torch.compile(apply_pair, backend="aot_eager", fullgraph=True) if compiled else apply_pair
    y = run(name, x)
    y.backward(values_of(tuple(y.shape), rank + 10))
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_forward_and_backward_of_every_pair(ranks: Ranks, compiled: bool) -> None:
    world = 2
    xs = [values_of((2, 4, 3), rank) for rank in range(world)]
    jobs = ranks(world).run(run_all, forward_and_backward, [(name, compiled) for name in PAIRS])
    for name, *results in zip(PAIRS, *jobs):
        grads = [values_of(tuple(results[0][0].shape), rank + 10) for rank in range(world)]
        for rank, (y, grad) in enumerate(results):
            forward = {
                "identity": lambda rank=rank: xs[rank],
                "all_reduce": lambda: xs[0] + xs[1],
                "all_gather": lambda: torch.cat(xs, 1),
                "scatter": lambda rank=rank: xs[rank].chunk(world, 1)[rank],
                "all_gather_reduce_scatter": lambda: torch.cat(xs, 1),
                "reduce_scatter": lambda rank=rank: (xs[0] + xs[1]).chunk(world, 1)[rank],
            }
            backward = {
                "identity": lambda: grads[0] + grads[1],  # noqa: B023
                "all_reduce": lambda rank=rank: grads[rank],  # noqa: B023
                "all_gather": lambda rank=rank: grads[rank].chunk(world, 1)[rank],  # noqa: B023
                "scatter": lambda: torch.cat(grads, 1),  # noqa: B023
                "all_gather_reduce_scatter": lambda rank=rank: (grads[0] + grads[1]).chunk(world, 1)[rank],  # noqa: B023
                "reduce_scatter": lambda: torch.cat(grads, 1),  # noqa: B023
            }
            assert torch.equal(y, forward[name]()), name
            assert torch.equal(grad, backward[name]()), name
