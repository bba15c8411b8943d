"""Sharded tensors in torch's distributed checkpoints: which boxes of the whole a rank holds, and which it writes.

A checkpoint of ``torch.distributed.checkpoint`` is made of boxes that do not overlap, and any number of ranks may read
any part of them. A shard with packed segments is several boxes; what lives on several ranks is written by the first of
them.
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
    from ..tensor.sharded_tensor import ShardedTensor


class Chunk(NamedTuple):
    """A box that a rank holds."""

    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    sizes: tuple[int, ...]
    within: tuple[int, ...]
    """Where it begins in the shard."""
    owner: int
    """The first of the ranks that hold it."""


def chunks(placement: Placement, shape: Sequence[int], rank: int) -> list[Chunk]:
    """The boxes that ``rank`` holds, cut such that any two ranks hold either the same box or different elements."""
    layouts = placement.dims if isinstance(placement, Shard) else {}
    ranks = range(placement.world if isinstance(placement, Shard) else 0)
    pieces: list[list[_Piece]] = []
    for dim, size in enumerate(shape):
        if dim not in layouts:
            pieces.append([_Piece(0, size, 0, frozenset(ranks))])
            continue
        held = [layouts[dim].expand(size, r) for r in ranks]
        pieces.append([])
        within = 0
        for start, stop in _cut(held[rank], held):
            holders = frozenset(r for r in ranks if any(a <= start and stop <= b for a, b in held[r]))
            pieces[-1].append(_Piece(start, stop - start, within, holders))
            within += stop - start
    found = []
    for box in product(*pieces):
        holders = frozenset(ranks).intersection(*(piece.holders for piece in box))
        sizes = tuple(piece.size for piece in box)
        if prod(sizes):
            offsets, places = tuple(piece.start for piece in box), tuple(piece.within for piece in box)
            found.append(Chunk(offsets, sizes, places, min(holders, default=0)))
    return found


class _Piece(NamedTuple):
    """A range of one dimension."""

    start: int
    size: int
    within: int
    holders: frozenset[int]


def _cut(ranges: Ranges, others: Sequence[Ranges]) -> list[tuple[int, int]]:
    """The ranges, cut wherever one of the others begins or ends."""
    edges = sorted({edge for held in others for span in held for edge in span})
    found = []
    for start, stop in ranges:
        cuts = [start, *(edge for edge in edges if start < edge < stop), stop]
        found += list(pairwise(cuts))
    return found


# -- what torch asks of a tensor -------------------------------------------------------------------------------


def chunks_of(tensor: ShardedTensor) -> list[Chunk]:
    placement, rank = _held(tensor)
    return chunks(placement, tensor.shape, rank)


def _held(tensor: ShardedTensor) -> tuple[Placement, int]:
    """Where the elements are that a rank holds, and which rank this is."""
    if tensor.dp_shard is not None:
        return tensor.dp_shard.held, tensor.dp_shard.rank
    return tensor.placement, dist.get_rank(tensor._spec.group)


def chunk_list(tensor: ShardedTensor) -> list[Any]:
    """What this rank reads."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in chunks_of(tensor)]


def write_items(name: str, tensor: ShardedTensor) -> list[Any]:
    """What this rank writes."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    _, rank = _held(tensor)
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
    """The part of the shard that begins at ``offsets`` of the whole; written to, it changes the tensor."""
    for chunk in chunks_of(tensor):
        if offsets is None or chunk.offsets == tuple(offsets):
            return tensor._local.detach()[
                tuple(slice(a, a + n) for a, n in zip(chunk.within, chunk.sizes, strict=True))
            ]
    raise ValueError(f"no box begins at {tuple(offsets or ())} in {tensor!r}")
