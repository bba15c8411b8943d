"""Megatron's conjugate pairs: a collective forward, its counterpart backward.

========================================  ==============  ==============
function                                  forward         backward
========================================  ==============  ==============
differentiable_identity                   identity        all-reduce
differentiable_all_reduce_sum             all-reduce      identity
differentiable_all_gather                 all-gather      split
differentiable_scatter                    split           all-gather
differentiable_all_gather_reduce_scatter  all-gather      reduce-scatter
differentiable_reduce_scatter_sum         reduce-scatter  all-gather
========================================  ==============  ==============

Which one is right depends on what follows. After a plain all-gather every rank computes the same, so the gradient is
replicated and each rank takes its chunk. After an all-gather whose backward is a reduce-scatter every rank computes its
own share of the work, so the gradients are partial and must be summed.

All of these shard evenly and take any size, also a symbolic one; :func:`paraxis.distributed.redistribute` is the
general form, for every layout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .collectives import all_gather, dense, reduce_scatter, split
from .redistribute import _Reduce, _Share

Group = dist.ProcessGroup | None


class _AllGather(torch.autograd.Function):
    """Forward all-gather, backward split."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dense(split(grad, ctx.group, ctx.dim)), None, None


class _Scatter(torch.autograd.Function):
    """Forward split, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return dense(split(x, group, dim))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.dim), None, None


class _AllGatherReduceScatter(torch.autograd.Function):
    """Forward all-gather, backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter(grad, ctx.group, ctx.dim), None, None


class _ReduceScatterSum(torch.autograd.Function):
    """Forward reduce-scatter, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.dim), None, None


def differentiable_identity(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Megatron's *f*, into a parallel region: identity forward, all-reduce backward."""
    return _Share.apply(tensor, group)  # type: ignore[no-any-return]


def differentiable_all_reduce_sum(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Megatron's *g*, out of a parallel region: all-reduce forward, identity backward."""
    return _Reduce.apply(tensor, group)  # type: ignore[no-any-return]


def differentiable_all_gather(tensor: torch.Tensor, group: Group = None, dim: int = -1) -> torch.Tensor:
    """Sharded to replicated: all-gather forward, split backward."""
    return _AllGather.apply(tensor, group, dim)  # type: ignore[no-any-return]


def differentiable_scatter(tensor: torch.Tensor, group: Group = None, dim: int = -1) -> torch.Tensor:
    """Replicated to sharded: split forward, all-gather backward."""
    return _Scatter.apply(tensor, group, dim)  # type: ignore[no-any-return]


def differentiable_all_gather_reduce_scatter(tensor: torch.Tensor, group: Group = None, dim: int = 0) -> torch.Tensor:
    """*f* from a tensor sharded on the sequence: all-gather forward, reduce-scatter backward."""
    return _AllGatherReduceScatter.apply(tensor, group, dim)  # type: ignore[no-any-return]


def differentiable_reduce_scatter_sum(tensor: torch.Tensor, group: Group = None, dim: int = 0) -> torch.Tensor:
    """*g* to a tensor sharded on the sequence: reduce-scatter forward, all-gather backward."""
    return _ReduceScatterSum.apply(tensor, group, dim)  # type: ignore[no-any-return]
