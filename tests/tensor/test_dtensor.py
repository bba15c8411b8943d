"""The DTensor bridge."""

from __future__ import annotations

from typing import Any

from tensor.sharded import PLACEMENTS, SHAPE, assert_same, random_tensor, sharded
from torch.distributed.tensor import DTensor


def dtensors() -> None:
    x = random_tensor()
    for name, p in PLACEMENTS.items():
        d = sharded(x, p).to_dtensor()
        assert isinstance(d, DTensor) and tuple(d.shape) == SHAPE, name
        assert d.placements[0].is_shard() == (name in ("rows", "columns")), name
        assert_same(name, d.full_tensor(), x)
        assert_same(f"{name} with a sharded tensor", sharded(x, p) + d.detach(), 2 * x)


def test_sharded_tensors_as_dtensors(ranks: Any) -> None:
    """Even shards stay sharded; layouts that DTensor lacks are replicated. On a mesh see tests/data_parallel."""
    ranks(2).run(dtensors)
