"""Shards cut and put together by plain indexing: what the library's own ways are checked against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paraxis.context import ParallelExecutionCtx
from paraxis.placement import Placement, Shard
from paraxis.tensor.sharded_tensor import ShardedTensor, ShardSpec


def world_ctx() -> ParallelExecutionCtx:
    """The context of all ranks of the job."""
    assert dist.group.WORLD is not None
    return ParallelExecutionCtx(dist.group.WORLD, torch.device("cpu"))


def each(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The results of `function` for all cases in one job, for jobs cost more than these cases do."""
    return [function(*case) for case in cases]


def _indices(placement: Placement, shape: Sequence[int], rank: int) -> list[torch.Tensor]:
    dims = placement.dims if isinstance(placement, Shard) else {}
    held = []
    for dim, size in enumerate(shape):
        spans = dims[dim].expand(size, rank) if dim in dims else ((0, size),)
        held.append(torch.tensor([i for start, stop in spans for i in range(start, stop)], dtype=torch.long))
    return held


def cut(whole: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """The shard of `rank`."""
    for dim, index in enumerate(_indices(placement, whole.shape, rank)):
        whole = whole.index_select(dim, index)
    return whole


def spread(local: torch.Tensor, placement: Placement, shape: Sequence[int], rank: int) -> torch.Tensor:
    """The shard of `rank` at its place in a tensor of zeros."""
    whole = local.new_zeros(tuple(shape))
    if local.numel():
        whole[torch.meshgrid(*_indices(placement, shape, rank), indexing="ij")] = local
    return whole


def assemble(locals_: Sequence[torch.Tensor], placement: Placement, shape: Sequence[int]) -> torch.Tensor:
    """The sum of all shards at their places: for gradients of shards, the gradient of the whole."""
    parts = [spread(local, placement, shape, rank) for rank, local in enumerate(locals_)]
    return torch.stack(parts).sum(0)


def placed(whole: torch.Tensor, placement: Placement) -> nn.Parameter:
    """A sharded parameter with this rank's shard of `whole`."""
    local = cut(whole.detach(), placement, dist.get_rank()).clone()
    spec = ShardSpec(placement, dist.group.WORLD)
    return nn.Parameter(ShardedTensor(local, spec, whole.shape))
