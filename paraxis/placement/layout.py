"""Layouts: which indices of one dimension each rank holds, as exact ranges.

A layout covers contiguous splits, *packed* dimensions (``[q|k|v]``: every segment is split separately), *replicated
groups* (four KV heads over eight ranks: each head on two) and uneven splits. The cost of an operation on a layout does
not grow with the size of the dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import DivisibilityError

Range = tuple[int, int]
"""A half-open range of indices: (start, stop)."""
Ranges = tuple[Range, ...]
"""Sorted ranges that do not touch."""


def ensure_divisibility(numerator: int, denominator: int, module: str = "", dim: str = "") -> None:
    """Raise an error that names the module and the dimension unless ``denominator`` divides ``numerator``.

    Raises:
        DivisibilityError: both a ``RuntimeError`` and a ``ValueError``.
    """
    if denominator <= 0 or numerator % denominator != 0:
        where = f" of `{module}`" if module else ""
        what = f"{dim}{where}" if dim else (module or "this size")
        raise DivisibilityError(
            f"{numerator} is not divisible by {denominator}, so {what} cannot be split evenly over the ranks. "
            f"Use a number of ranks that divides {numerator}, or change the model's sizes."
        )


def _merge(ranges: Iterable[Range]) -> Ranges:
    """Sort, drop empty ranges and join those that touch."""
    merged: list[Range] = []
    for start, stop in sorted(r for r in ranges if r[1] > r[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _clip(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The part of ``ranges`` inside ``[start, stop)``, counted from ``start``."""
    return _merge((max(a, start) - start, min(b, stop) - start) for a, b in ranges)


def length_of(ranges: Ranges) -> int:
    """How many indices the ranges have."""
    return sum(stop - start for start, stop in ranges)


def _spread(size: int, parts: int, unit: int) -> list[Range]:
    """``size`` indices split into ``parts`` contiguous ranges, as evenly as units of ``unit`` allow.

    With fewer units than parts, several parts get the same unit.
    """
    count = size // unit
    if count * unit != size:
        raise ValueError(f"{size} indices cannot be divided into units of {unit}")
    if count < parts:
        base, extra = divmod(parts, count)
        owners = [u for u in range(count) for _ in range(base + (u < extra))]
        return [(u * unit, (u + 1) * unit) for u in owners]
    base, extra = divmod(count, parts)
    starts = [p * base + min(p, extra) for p in range(parts + 1)]
    return [(starts[p] * unit, starts[p + 1] * unit) for p in range(parts)]


@dataclass(frozen=True)
class Layout:
    """Which indices of one dimension each rank holds.

    The pattern ``ranges`` (one tuple of index ranges per rank) covers ``period`` indices and repeats along the
    dimension, so that a layout does not depend on how often it repeats: that count may be a symbolic size. Build
    layouts with the class methods; they bring them into canonical form (smallest period), so that equality is
    equality of meaning.
    """

    period: int
    ranges: tuple[Ranges, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.period, self.ranges)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    # -- construction ------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, period: int, ranges: Sequence[Iterable[Range]]) -> Layout:
        """The canonical layout with these ranges per rank."""
        return _canonical(period, tuple(_merge(r) for r in ranges))

    @classmethod
    def even(cls, size: int, world: int, unit: int = 1) -> Layout:
        """A contiguous split of ``size`` indices, in units of ``unit`` that are never split.

        With fewer units than ranks each unit lives on several ranks; with a count that does not divide, the first
        ranks hold one unit more (or the first units live on one rank more).
        """
        return cls.of(size, [[span] for span in _spread(size, world, unit)])

    @classmethod
    def grouped(cls, size: int, world: int, unit: int, groups: int) -> Layout:
        """Units in ``groups`` of equal size, such that no rank holds a part of one group and a part of another.

        Query heads that share key/value heads need this. Ranks are assigned to groups (or groups to ranks) as evenly as
        possible, and inside a group its units to its ranks.
        """
        each = size // groups
        if groups >= world:
            return cls.even(size, world, each)
        ranges: list[list[Range]] = []
        base, extra = divmod(world, groups)
        for g in range(groups):
            inside = _spread(each, base + (g < extra), unit)
            ranges += [[(g * each + a, g * each + b)] for a, b in inside]
        return cls.of(size, ranges)

    @classmethod
    def full(cls, world: int) -> Layout:
        """Every rank holds every index."""
        return cls(1, (((0, 1),),) * world)

    @classmethod
    def concat(cls, parts: Sequence[tuple[int, Layout]]) -> Layout:
        """The layout of a dimension packed from segments: (size, layout) of each."""
        world = parts[0][1].world
        ranges: list[list[Range]] = [[] for _ in range(world)]
        offset = 0
        for size, layout in parts:
            for rank in range(world):
                ranges[rank] += [(a + offset, b + offset) for a, b in layout.expand(size, rank)]
            offset += size
        return cls.of(offset, ranges)

    # -- queries -----------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranges)

    @property
    def is_full(self) -> bool:
        """Every rank holds everything. Never true on one rank: a plan must not depend on the number of ranks."""
        return self.world > 1 and all(length_of(r) == self.period for r in self.ranges)

    @property
    def is_even(self) -> bool:
        """Every rank holds the same number of indices."""
        return len({length_of(r) for r in self.ranges}) == 1

    @property
    def has_copies(self) -> bool:
        """Some index is on more than one rank."""
        return sum(length_of(r) for r in self.ranges) > self.period

    def fits(self, size: Any) -> bool:
        """Whether a dimension of this (possibly symbolic) size can have this layout."""
        return not isinstance(size, int) or (size % self.period == 0 and size > 0)

    def expand(self, size: int, rank: int) -> Ranges:
        """The index ranges that ``rank`` holds of a dimension of ``size``: what to read from a checkpoint."""
        period, ranges = self.period, self.ranges[rank]
        if not ranges or ranges == ((0, period),):  # repeated, these are nothing and one range
            return ((0, size),) if ranges and size else ()
        return _merge((a + k * period, b + k * period) for k in range(size // period) for a, b in ranges)

    def local_size(self, size: int, rank: int) -> int:
        """How many of ``size`` indices ``rank`` holds."""
        return size // self.period * length_of(self.ranges[rank])

    def contiguous(self, size: int) -> bool:
        """Whether every rank holds one contiguous range, in the order of the ranks and without copies."""
        if self.world == 1:
            return size > 0 and self.ranges[0] == ((0, self.period),)
        if size != self.period:  # every rank holds a range of each repeat, or of none
            return False
        ends = [0] + [r[0][1] if len(r) == 1 else -1 for r in self.ranges]
        return all(len(r) == 1 and r[0][0] == ends[i] for i, r in enumerate(self.ranges)) and ends[-1] == size

    def replica(self, rank: int) -> tuple[int, int]:
        """(position among, number of) the ranks that hold the same indices as ``rank``."""
        replicas = [r for r in range(self.world) if self.ranges[r] == self.ranges[rank]]
        return replicas.index(rank), len(replicas)

    # -- how views change a layout -----------------------------------------------------------------------------

    def scale(self, inner: int) -> Layout:
        """The layout after flattening with an inner dimension: each index becomes ``inner`` consecutive ones."""
        return Layout.of(self.period * inner, [[(a * inner, b * inner) for a, b in r] for r in self.ranges])

    def unscale(self, inner: int) -> Layout | None:
        """The inverse of :meth:`scale`; None unless every rank holds ``inner`` consecutive indices together."""
        if self.period == 1:  # each rank holds all or nothing: true at every scale
            return self
        if self.period % inner or any(a % inner or b % inner for r in self.ranges for a, b in r):
            return None
        return Layout.of(self.period // inner, [[(a // inner, b // inner) for a, b in r] for r in self.ranges])

    def slice(self, size: int, start: int, stop: int) -> Layout:
        """The layout of the slice ``start:stop`` of a dimension of ``size``."""
        return Layout.of(stop - start, [_clip(self.expand(size, r), start, stop) for r in range(self.world)])

    def local_slice(self, size: int, start: int, stop: int, rank: int) -> Range:
        """Where the slice ``start:stop`` of the full dimension is in the shard of ``rank``."""
        held = self.expand(size, rank)
        before = length_of(_clip(held, 0, start))
        return before, before + length_of(_clip(held, start, stop))

    # -- text --------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        if self.contiguous(self.period):
            return "even" if self.is_even else "uneven"
        spans = ",".join("+".join(f"{a}:{b}" for a, b in r) for r in self.ranges)
        return f"{spans} of {self.period}"

    def to_json(self) -> dict[str, Any]:
        """The layout as plain data."""
        return {"period": self.period, "ranges": [[list(r) for r in rank] for rank in self.ranges]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """The inverse of :meth:`to_json`."""
        return cls.of(data["period"], [[(a, b) for a, b in rank] for rank in data["ranges"]])


@lru_cache(maxsize=65536)
def _canonical(period: int, ranges: tuple[Ranges, ...]) -> Layout:
    """Shorten the period as far as the pattern repeats.

    A rank that holds neither nothing nor everything has at least one range per repeat, which bounds the search.
    """
    divided = [len(r) for r in ranges if length_of(r) not in (0, period)]
    if not divided:
        return Layout(1, tuple(((0, 1),) if r else () for r in ranges))
    for repeats in range(min(divided), 1, -1):
        if period % repeats:
            continue
        short = period // repeats
        head = tuple(_clip(r, 0, short) for r in ranges)
        if all(
            _clip(r, k * short, (k + 1) * short) == h
            for r, h in zip(ranges, head, strict=True)
            for k in range(1, repeats)
        ):
            return Layout(short, head)
    return Layout(period, ranges)
