"""Sharding and unsharding by plain indexing: the reference that the library's own ways are checked against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paraxis.placement import Placement, Shard
from paraxis.tensor.sharded_tensor import ShardedTensor, ShardSpec


def run_all(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The results of `function` for all cases in one job: starting a job costs more than such a case does."""
    return [function(*case) for case in cases]


def _indices(placement: Placement, shape: Sequence[int], rank: int) -> list[torch.Tensor]:
    dims = placement.dims if isinstance(placement, Shard) else {}
    indices = []
    for dim, size in enumerate(shape):
        ranges = dims[dim].expand(size, rank) if dim in dims else ((0, size),)
        indices.append(torch.tensor([i for start, stop in ranges for i in range(start, stop)], dtype=torch.long))
    return indices


def local_shard(full: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """The shard of `rank`."""
    for dim, index in enumerate(_indices(placement, full.shape, rank)):
        full = full.index_select(dim, index)
    return full


def pad_to_full(local: torch.Tensor, placement: Placement, shape: Sequence[int], rank: int) -> torch.Tensor:
    """The full tensor, with the shard of `rank` at its indices and zeros elsewhere."""
    full = local.new_zeros(tuple(shape))
    if local.numel():
        full[torch.meshgrid(*_indices(placement, shape, rank), indexing="ij")] = local
    return full


def sum_shards(shards: Sequence[torch.Tensor], placement: Placement, shape: Sequence[int]) -> torch.Tensor:
    """The sum of all shards, each at its indices: of gradients of shards, the gradient of the full tensor."""
    padded = [pad_to_full(local, placement, shape, rank) for rank, local in enumerate(shards)]
    return torch.stack(padded).sum(0)


def sharded_parameter(full: torch.Tensor, placement: Placement) -> nn.Parameter:
    """A sharded parameter with this rank's shard of `full`."""
    local = local_shard(full.detach(), placement, dist.get_rank()).clone()
    spec = ShardSpec(placement, dist.group.WORLD)
    return nn.Parameter(ShardedTensor(local, spec, full.shape))
