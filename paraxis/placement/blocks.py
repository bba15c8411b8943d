"""Block-granular dimensions: how a dimension of a stored tensor follows one of the tensor that it encodes.

A quantized weight is one logical tensor that is stored as several: packed values, a scale per block or group, zero
points. Each of their dimensions follows a dimension of the weight (or none): an index of the weight is in a *block* of
the stored dimension. A rank that holds some indices of the weight holds the blocks they are in. A block that two ranks
need is on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .layout import Layout, Ranges
from .placements import REPLICATE, Placement, Shard


class Segment(NamedTuple):
    """Indices ``start`` to ``stop`` of the weight: index ``i`` is in block ``first + (i - start + phase) // block``."""

    start: int
    stop: int
    first: int = 0
    phase: int = 0


class Run(NamedTuple):
    """Consecutive indices of a shard: index ``i`` of them is in block ``first + (i + phase) // block`` of the shard."""

    length: int
    first: int
    phase: int


@dataclass(frozen=True)
class Axis:
    """One dimension of a stored tensor.

    Attributes:
        size: Its size: the number of blocks.
        dim: The dimension of the weight that it follows; None if it is the same for all indices of the weight.
        block: How many indices of the weight are in a block.
        segments: Where the blocks begin, for weights put together from several; by default all blocks in order.
    """

    size: int
    dim: int | None = None
    block: int = 1
    segments: tuple[Segment, ...] = ()

    @classmethod
    def blocks(cls, dim: int, size: int, block: int) -> Axis:
        """Blocks of ``block`` indices of a dimension of ``size``, of which the last may be shorter."""
        return cls(-(-size // block), dim, block)

    @classmethod
    def pieces(cls, dim: int, block: int, pieces: Sequence[tuple[int, int]]) -> Axis:
        """A dimension put together from pieces (start in its source, length): blocks are those of the sources."""
        found, first, at = list[Segment](), 0, 0
        for start, length in pieces:
            found.append(Segment(at, at + length, first, start % block))
            first += -(-(start % block + length) // block)
            at += length
        regular = all(s.phase == 0 and s.start % block == 0 for s in found)
        return cls(first, dim, block, () if regular else tuple(found))

    def segments_of(self, size: int) -> tuple[Segment, ...]:
        """The segments of a weight's dimension of this size."""
        return self.segments or (Segment(0, size),)

    def layout(self, layout: Layout, size: int) -> Layout:
        """Which blocks each rank holds, if it holds these indices of the weight's dimension of this ``size``."""
        held = [self._blocks(layout.expand(size, rank), size) for rank in range(layout.world)]
        return Layout.of(self.size, held)

    def _blocks(self, ranges: Ranges, size: int) -> list[tuple[int, int]]:
        found = []
        for segment in self.segments_of(size):
            for start, stop in ranges:
                a, b = max(start, segment.start), min(stop, segment.stop)
                if a < b:
                    offset = segment.phase - segment.start
                    blocks = (a + offset) // self.block, -(-(b + offset) // self.block)
                    found.append((segment.first + blocks[0], segment.first + blocks[1]))
        return found

    def runs(self, ranges: Ranges, size: int) -> list[Run]:
        """For the indices of the weight in ``ranges``, in order, the blocks they are in, among those that are held."""
        held = _merged(self._blocks(ranges, size))
        found: list[Run] = []
        for start, stop in ranges:
            for segment in self.segments_of(size):
                a, b = max(start, segment.start), min(stop, segment.stop)
                if a < b:
                    at = a + segment.phase - segment.start
                    first = _position(held, segment.first + at // self.block)
                    found.append(Run(b - a, first, at % self.block))
        return found

    def is_regular(self, runs: Sequence[Run]) -> bool:
        """Whether index ``i`` of a shard with these runs is in its block ``i // block``."""
        at = 0
        for run in runs:
            last = at + run.length - 1
            aligned = run.phase == at % self.block
            in_one = run.phase + run.length <= self.block and at // self.block == last // self.block
            if run.first != at // self.block or not (aligned or in_one):
                return False
            at += run.length
        return True


def stored_placement(axes: Sequence[Axis], placement: Placement, shape: Sequence[int]) -> Placement:
    """The placement of a stored tensor, if the weight of this ``shape`` has this placement."""
    if not isinstance(placement, Shard) or not placement.layouts:
        return REPLICATE
    layouts: Mapping[int, Layout] = placement.dims
    found = {
        i: axis.layout(layouts[axis.dim], shape[axis.dim])
        for i, axis in enumerate(axes)
        if axis.dim is not None and axis.dim in layouts
    }
    sharded = {i: layout for i, layout in found.items() if not layout.is_full}
    return Shard.of(sharded) if sharded else REPLICATE


def is_granular(layout: Layout, size: int, unit: int) -> bool:
    """Whether every rank begins and ends at a multiple of ``unit`` or at the end."""
    edges = {edge for rank in range(layout.world) for span in layout.expand(size, rank) for edge in span}
    return all(edge % unit == 0 or edge == size for edge in edges)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _position(held: Sequence[tuple[int, int]], block: int) -> int:
    """The position of a block among those that are held."""
    before = 0
    for start, stop in held:
        if start <= block < stop:
            return before + block - start
        before += stop - start
    raise ValueError(f"block {block} is not held")
