"""Specs, and the way between full tensors and shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.shards import local_shard
from tensor.sharded import PLACEMENTS, random_tensor, sharded

from paraxis.placement import REPLICATE, Layout, Shard
from paraxis.tensor.sharding import ShardSpec, full_tensor_of, shard_of, spec_of


def test_specs_compare_by_value() -> None:
    """Compiled code is guarded on them."""
    p = Shard.of(0, Layout.even(4, 2))
    assert ShardSpec(p, None) == ShardSpec(Shard.of(0, Layout.even(4, 2)), None)
    assert hash(ShardSpec(p, None)) == hash(ShardSpec(Shard.of(0, Layout.even(4, 2)), None))
    assert ShardSpec(p, None) != ShardSpec(REPLICATE, None)
    assert ShardSpec(p, None) != p


def there_and_back() -> None:
    x = random_tensor()
    for name, p in PLACEMENTS.items():
        t = sharded(x, p)
        assert torch.equal(full_tensor_of(t), x), name
        assert torch.equal(shard_of(x, t), local_shard(x, p, dist.get_rank())), name
        assert spec_of(t) == t.spec and spec_of(t) is not t.spec


def test_full_tensors_and_shards(ranks: Any) -> None:
    ranks(2).run(there_and_back)
