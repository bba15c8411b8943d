"""Chunks of sharded tensors in torch's distributed checkpoints."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from tensor.sharded import PLACEMENTS as ON_TWO_RANKS
from tensor.sharded import random_tensor, sharded

from paraxis.placement import REPLICATE, Layout, Placement, Shard, local_index, local_shape
from paraxis.tensor.checkpoint_chunks import chunk_at, chunk_list, chunks, write_items

PLACEMENTS: dict[str, tuple[Placement, tuple[int, ...]]] = {
    "replicated": (REPLICATE, (4, 6)),
    "even": (Shard.of(0, Layout.even(8, 4)), (8, 3)),
    "uneven": (Shard.of(1, Layout.even(10, 4)), (2, 10)),
    "packed": (Shard.of(0, Layout.concat([(8, Layout.even(8, 4)), (4, Layout.even(4, 4))])), (12, 2)),
    "copies": (Shard.of(0, Layout.even(6, 4, 3)), (6, 2)),
    "packed with copies": (Shard.of(0, Layout.concat([(8, Layout.even(8, 4)), (4, Layout.even(4, 4, 2))])), (12, 2)),
    "two dimensions": (Shard.of({0: Layout.even(6, 4, 3), 1: Layout.even(8, 4)}), (6, 8)),
    "overlapping": (Shard.of(0, Layout.of(4, [[(0, 2)], [(1, 3)], [(2, 4)], [(0, 4)]])), (8, 2)),
    "scalar": (REPLICATE, ()),
}


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_every_element_is_written_once_and_read_by_all_that_hold_it(kind: str) -> None:
    placement, shape = PLACEMENTS[kind]
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    written = torch.zeros(shape, dtype=torch.int64)
    for rank in range(4):
        local = full
        for dim, ranges in enumerate(local_index(placement, shape, rank)):
            local = torch.cat([local.narrow(dim, a, b - a) for a, b in ranges], dim)
        seen = torch.zeros(local_shape(placement, shape, rank), dtype=torch.int64)
        for chunk in chunks(placement, shape, rank):
            there = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            here = tuple(slice(a, a + n) for a, n in zip(chunk.local_offsets, chunk.sizes, strict=True))
            assert torch.equal(full[there], local[here])
            seen[here] += 1
            written[there] += chunk.owner == rank
        assert bool((seen == 1).all())
    held = torch.zeros(shape, dtype=torch.bool)
    for rank in range(4):
        for spans in product(*local_index(placement, shape, rank)):
            held[tuple(slice(*span) for span in spans)] = True
    assert torch.equal(written, held.long())


def protocol() -> list[int]:
    """What torch asks of a tensor: chunks to read, items to write, and views to read into."""
    x, sizes = random_tensor(), []
    for p in ON_TWO_RANKS.values():
        t = sharded(x, p)
        for chunk in chunk_list(t):
            index = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert torch.equal(chunk_at(t, chunk.offsets), x[index])
            chunk_at(t, chunk.offsets).zero_()
        assert not t.local.any(), "chunks are views of the shard"
        sizes.append(sum(item.tensor_data.chunk.sizes.numel() for item in write_items("w", t)))
    with pytest.raises(ValueError, match=r"no chunk begins at \(99, 0\)"):
        chunk_at(t, (99, 0))
    return sizes


def test_ranks_write_everything_together(ranks: Any) -> None:
    first, second = ranks(2).run(protocol)
    assert [a + b for a, b in zip(first, second, strict=True)] == [48] * len(ON_TWO_RANKS)
