"""Sharded tensors of every kind of placement on two ranks, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.shards import local_shard

from paraxis.placement import REPLICATE, Layout, Placement, Shard, local_shape
from paraxis.tensor.sharded_tensor import ShardedTensor, ShardSpec, wrap

SHAPE = (6, 8)
PLACEMENTS: dict[str, Placement] = {
    "rows": Shard.of(0, Layout.even(6, 2)),
    "columns": Shard.of(1, Layout.even(8, 2)),
    "packed": Shard.of(1, Layout.concat([(4, Layout.even(4, 2))] * 2)),
    "uneven": Shard.of(0, Layout.of(6, [[(0, 4)], [(4, 6)]])),
    "copies": Shard.of(1, Layout.of(8, [[(0, 6)], [(2, 8)]])),
    "replicated": REPLICATE,
}


def random_tensor(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """The same full tensor on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sharded(full: torch.Tensor, placement: Placement) -> ShardedTensor:
    """This rank's shard of a full tensor, wrapped."""
    local = local_shard(full, placement, dist.get_rank()).clone()
    return wrap(local, ShardSpec(placement, dist.group.WORLD), full.shape)


def assert_same(name: str, found: Any, expected: torch.Tensor, placement: Placement | None = None) -> None:
    """The same values; with ``placement``, in a sharded tensor that has it."""
    if placement is not None:
        assert isinstance(found, ShardedTensor), f"{name}: a {type(found).__name__}"
        assert found.placement == placement, name
        assert tuple(found.local.shape) == local_shape(placement, expected.shape, dist.get_rank()), name
        found = found.full_tensor()
    assert torch.allclose(found, expected, atol=1e-6), name
