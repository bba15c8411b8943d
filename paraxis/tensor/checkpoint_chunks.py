"""Sharded tensors in torch's distributed checkpoints: which chunks of the full tensor a rank holds and writes.

A checkpoint of ``torch.distributed.checkpoint`` consists of chunks (boxes) that do not overlap, and any number of ranks
may read any part of them. A shard with packed segments is several chunks; a chunk that several ranks hold is written by
the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..placement import Placement, Ranges, Shard

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor


class Chunk(NamedTuple):
    """A box of the full tensor that a rank holds."""

    offsets: tuple[int, ...]
    """Where it begins in the full tensor."""
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    """Where it begins in the shard."""
    owner: int
    """The first of the ranks that hold it."""


def chunks(placement: Placement, shape: Sequence[int], rank: int) -> list[Chunk]:
    """The chunks that ``rank`` holds, divided such that two ranks hold either the same chunk or disjoint ones."""
    layouts = placement.dims if isinstance(placement, Shard) else {}
    ranks = range(placement.world if isinstance(placement, Shard) else 0)
    pieces: list[list[_Piece]] = []
    for dim, size in enumerate(shape):
        if dim not in layouts:
            pieces.append([_Piece(0, size, 0, frozenset(ranks))])
            continue
        held = [layouts[dim].expand(size, r) for r in ranks]
        pieces.append([])
        local_start = 0
        for start, stop in _divide(held[rank], held):
            holders = frozenset(r for r in ranks if any(a <= start and stop <= b for a, b in held[r]))
            pieces[-1].append(_Piece(start, stop - start, local_start, holders))
            local_start += stop - start
    found = []
    for box in product(*pieces):
        holders = frozenset(ranks).intersection(*(piece.holders for piece in box))
        sizes = tuple(piece.size for piece in box)
        if prod(sizes):
            offsets, local = tuple(piece.start for piece in box), tuple(piece.local_start for piece in box)
            found.append(Chunk(offsets, sizes, local, min(holders, default=0)))
    return found


class _Piece(NamedTuple):
    """A range of one dimension."""

    start: int
    size: int
    local_start: int
    holders: frozenset[int]


def _divide(ranges: Ranges, others: Sequence[Ranges]) -> list[tuple[int, int]]:
    """The ranges, divided wherever one of the others begins or ends."""
    edges = sorted({edge for held in others for span in held for edge in span})
    found = []
    for start, stop in ranges:
        bounds = [start, *(edge for edge in edges if start < edge < stop), stop]
        found += list(pairwise(bounds))
    return found


# -- the protocol of torch.distributed.checkpoint -------------------------------------------------------------


def chunks_of(tensor: ShardedTensor) -> list[Chunk]:
    """The chunks that this rank holds of a sharded tensor."""
    placement, rank = _mesh_placement(tensor)
    return chunks(placement, tensor.shape, rank)


def _mesh_placement(tensor: ShardedTensor) -> tuple[Placement, int]:
    """The placement over all ranks that hold different elements, and this rank among them."""
    if tensor.dp_shard is not None:
        return tensor.dp_shard.mesh_placement, tensor.dp_shard.rank
    return tensor.placement, dist.get_rank(tensor._spec.group)


def chunk_list(tensor: ShardedTensor) -> list[Any]:
    """The chunks that this rank reads."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in chunks_of(tensor)]


def write_items(name: str, tensor: ShardedTensor) -> list[Any]:
    """The chunks that this rank writes."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    _, rank = _mesh_placement(tensor)
    properties = TensorProperties.create_from_tensor(tensor._local)
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(chunk.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
                properties=properties,
                size=tensor.shape,
            ),
        )
        for chunk in chunks_of(tensor)
        if chunk.owner == rank
    ]


def chunk_at(tensor: ShardedTensor, offsets: Sequence[int] | None) -> torch.Tensor:
    """The chunk that begins at ``offsets`` of the full tensor: a view of the shard, which may be written to."""
    for chunk in chunks_of(tensor):
        if offsets is None or chunk.offsets == tuple(offsets):
            return tensor._local.detach()[
                tuple(slice(a, a + n) for a, n in zip(chunk.local_offsets, chunk.sizes, strict=True))
            ]
    raise ValueError(f"no chunk begins at {tuple(offsets or ())} in {tensor!r}")
