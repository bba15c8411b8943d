"""Shards leave a program as sharded tensors, and writes into full tensors reach the shard of an input."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.shards import local_shard

from paraxis.distributed.operators import encode
from paraxis.placement import Layout, Shard
from paraxis.tensor.graph_io import wrap_shard, wrap_shards, write_shard
from paraxis.tensor.sharded_tensor import ShardedTensor

PLACEMENTS = {"even": Shard.of(1, Layout.even(6, 2)), "uneven": Shard.of(1, Layout.even(7, 2))}


def wrap_and_write() -> dict[str, Any]:
    """Full tensors of wrapped shards with static and dynamic sizes, and of a shard after a write."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    found: dict[str, Any] = {}
    for name, placement in PLACEMENTS.items():
        full = torch.arange(float(2 * placement.dims[1].period)).view(2, -1)
        local, text = local_shard(full, placement, rank), encode(placement)
        for shape in (tuple(full.shape), (-1, -1)):
            wrapped = wrap_shard(local, text, shape, group)
            assert isinstance(wrapped, ShardedTensor) and wrapped.placement == placement
            found[f"{name} {shape}"] = torch.equal(wrapped.full_tensor(), full)
            results: list[Any] = [local, "other", torch.cat([local, local]), local + 1]
            wrap_shards(results, {(text, shape, group): [0, 3]})
            wrap_shards(results, {(text, (-1, -1), group): [2]})
            fulls = [results[0].full_tensor(), results[2].full_tensor(), results[3].full_tensor()]
            found[f"{name} {shape} together"] = results[1] == "other" and all(
                map(torch.equal, fulls, [full, torch.cat([full, full]), full + 1])
            )
        write_shard(local, full * 2, text, group)
        found[f"{name} written"] = torch.equal(local, local_shard(full * 2, placement, rank))
    return found


def test_shards_become_sharded_tensors_of_the_global_size(ranks: Any) -> None:
    for found in ranks(2).run(wrap_and_write):
        assert all(found.values()), found
