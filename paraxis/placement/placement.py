"""Where the elements of a tensor live: the algebra of placements.

This module knows nothing of process groups, of devices or of torch. A placement describes, exactly and for every rank,
which elements of a *global* tensor that rank holds. There are three kinds:

- :class:`Replicate`: every rank holds everything, and every rank computes the same gradient of it.
- :class:`Partial`: every rank holds a tensor of the full shape; the value is their sum.
- :class:`Shard`: every rank holds a box of the tensor: for each sharded dimension, the index ranges of a
  :class:`Layout`. A layout covers contiguous splits, *packed* dimensions (``[q|k|v]``: each segment split by
  itself), *replicated groups* (four KV heads over eight ranks: each head on two) and uneven splits.

Gradients follow the placement. The gradient of a replicated tensor is replicated; that of a partial one is
replicated too (every rank's term gets the gradient of the sum). An element of a shard that lives on several ranks
gets its gradient in *parts*, one on each rank that holds it, and their sum is the gradient. A shard with no sharded
dimension at all (:data:`SHARED`) is therefore not the same thing as :class:`Replicate`: both hold everything
everywhere, but each rank uses a shared tensor for its own part of the work. Turning a replicated tensor into a
shared one is Megatron's *f*: nothing forward, an all-reduce backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def ensure_divisibility(numerator: int, denominator: int, module: str = "", dim: str = "") -> None:
    """Raise an error that names the module and the dimension unless ``denominator`` divides ``numerator``."""
    if denominator <= 0 or numerator % denominator != 0:
        where = f" of `{module}`" if module else ""
        what = f"{dim}{where}" if dim else (module or "this size")
        raise ValueError(
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


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _spread(size: int, parts: int, unit: int) -> list[Range]:
    """``size`` indices in units dealt to ``parts`` in order, as evenly as possible; or parts dealt to units."""
    count = size // unit
    if count * unit != size:
        raise ValueError(f"{size} indices are not made of units of {unit}")
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
        """A contiguous split of ``size`` indices, in units of ``unit`` that are never cut.

        With fewer units than ranks each unit lives on several ranks; with a count that does not divide, the first
        ranks hold one unit more (or the first units live on one rank more).
        """
        return cls.of(size, [[span] for span in _spread(size, world, unit)])

    @classmethod
    def grouped(cls, size: int, world: int, unit: int, groups: int) -> Layout:
        """Units in ``groups`` of equal size, such that no rank has a part of one group and a part of another.

        Query heads that share key/value heads need this: ranks are dealt to the groups, or groups to the ranks, as
        evenly as it goes, and inside a group its units to its ranks.
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
        """The layout of a dimension packed from segments of the given sizes, each with its own layout."""
        world = parts[0][1].world
        ranges: list[list[Range]] = [[] for _ in range(world)]
        offset = 0
        for size, layout in parts:
            for rank in range(world):
                ranges[rank] += [(a + offset, b + offset) for a, b in layout.expand(size, rank)]
            offset += size
        return cls.of(offset, ranges)

    # -- questions ---------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        return len(self.ranges)

    @property
    def is_full(self) -> bool:
        """Every rank holds everything. On a single rank a split is still a split: the plan must not depend on it."""
        return self.world > 1 and all(_length(r) == self.period for r in self.ranges)

    @property
    def is_even(self) -> bool:
        """Every rank holds the same number of indices."""
        return len({_length(r) for r in self.ranges}) == 1

    @property
    def has_copies(self) -> bool:
        """Some index lives on more than one rank."""
        return sum(_length(r) for r in self.ranges) > self.period

    def fits(self, size: Any) -> bool:
        """Whether a dimension of this (possibly symbolic) size can have this layout."""
        return not isinstance(size, int) or (size % self.period == 0 and size > 0)

    def expand(self, size: int, rank: int) -> Ranges:
        """The index ranges that ``rank`` holds of a dimension of ``size``: what to read from a checkpoint."""
        period = self.period
        return _merge((a + k * period, b + k * period) for k in range(size // period) for a, b in self.ranges[rank])

    def local_size(self, size: int, rank: int) -> int:
        """How many of ``size`` indices ``rank`` holds."""
        return size // self.period * _length(self.ranges[rank])

    def contiguous(self, size: int) -> bool:
        """Whether every rank holds one contiguous range, in the order of the ranks and without copies."""
        spans = [self.expand(size, r) for r in range(self.world)]
        ends = [0] + [s[0][1] if len(s) == 1 else -1 for s in spans]
        return all(len(s) == 1 and s[0][0] == ends[i] for i, s in enumerate(spans)) and ends[-1] == size

    def copies(self, size: int) -> list[int]:
        """For each index of a dimension of ``size``, on how many ranks it lives."""
        count = [0] * size
        for rank in range(self.world):
            for start, stop in self.expand(size, rank):
                for i in range(start, stop):
                    count[i] += 1
        return count

    def replica(self, rank: int) -> tuple[int, int]:
        """(position among, number of) the ranks that hold the same indices as ``rank``."""
        twins = [r for r in range(self.world) if self.ranges[r] == self.ranges[rank]]
        return twins.index(rank), len(twins)

    # -- how views change a layout -----------------------------------------------------------------------------

    def scale(self, inner: int) -> Layout:
        """The layout after each index becomes ``inner`` consecutive ones (an inner dimension is flattened in)."""
        return Layout.of(self.period * inner, [[(a * inner, b * inner) for a, b in r] for r in self.ranges])

    def unscale(self, inner: int) -> Layout | None:
        """The layout of the outer dimension if ``inner`` consecutive indices are always held together."""
        if self.period == 1:  # all or nothing: held together at every scale
            return self
        if self.period % inner or any(a % inner or b % inner for r in self.ranges for a, b in r):
            return None
        return Layout.of(self.period // inner, [[(a // inner, b // inner) for a, b in r] for r in self.ranges])

    def slice(self, size: int, start: int, stop: int) -> Layout:
        """The layout of the indices ``start`` to ``stop`` taken out of a dimension of ``size``."""
        return Layout.of(stop - start, [_clip(self.expand(size, r), start, stop) for r in range(self.world)])

    def local_slice(self, size: int, start: int, stop: int, rank: int) -> Range:
        """Where the indices ``start`` to ``stop`` lie in the shard of ``rank``."""
        held = self.expand(size, rank)
        before = _length(_clip(held, 0, start))
        return before, before + _length(_clip(held, start, stop))

    # -- text --------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        if self.contiguous(self.period):
            return "even" if self.is_even else "uneven"
        spans = ",".join("+".join(f"{a}:{b}" for a, b in r) for r in self.ranges)
        return f"{spans} of {self.period}"

    def to_json(self) -> dict[str, Any]:
        return {"period": self.period, "ranges": [[list(r) for r in rank] for rank in self.ranges]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        return cls.of(data["period"], [[(a, b) for a, b in rank] for rank in data["ranges"]])


@lru_cache(maxsize=65536)
def _canonical(period: int, ranges: tuple[Ranges, ...]) -> Layout:
    """Shorten the period as far as the pattern repeats.

    A rank that holds neither nothing nor everything has at least one range per repeat, which bounds the search.
    """
    cut = [len(r) for r in ranges if _length(r) not in (0, period)]
    if not cut:
        return Layout(1, tuple(((0, 1),) if r else () for r in ranges))
    for repeats in range(min(cut), 1, -1):
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


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a term of the full shape; the tensor is the sum of the terms."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Shard:
    """Every rank holds a box: per sharded dimension the ranges of a layout, all of the other dimensions.

    ``layouts`` is sorted by dimension and has no full layout in it. Use :meth:`of` to build one.
    """

    layouts: tuple[tuple[int, Layout], ...]

    def __hash__(self) -> int:
        """Computed when first asked for: compilers trace the making of placements, and not all of them can hash."""
        try:
            return self._hash  # type: ignore[attr-defined,no-any-return]
        except AttributeError:
            object.__setattr__(self, "_hash", hash(self.layouts))
            return self._hash  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def of(cls, layouts: Mapping[int, Layout] | int, layout: Layout | None = None) -> Shard:
        """``Shard.of(dim, layout)`` or ``Shard.of({dim: layout, ...})``."""
        items = {layouts: layout} if isinstance(layouts, int) else dict(layouts)
        return cls(
            tuple(sorted(((d, x) for d, x in items.items() if x is not None and not x.is_full), key=lambda i: i[0]))
        )

    @property
    def dims(self) -> dict[int, Layout]:
        return dict(self.layouts)

    @property
    def has_copies(self) -> bool:
        """Some element lives on more than one rank."""
        if not self.layouts:
            return True
        # In integers and lists: a compiler traces this in the backward of a redistribution.
        held = 0
        for rank in range(self.world):
            held += prod([_length(x.ranges[rank]) for _, x in self.layouts])
        return held > prod([x.period for _, x in self.layouts])

    @property
    def world(self) -> int:
        return self.layouts[0][1].world if self.layouts else 0

    def __str__(self) -> str:
        return "S(" + ", ".join(f"{d}" if str(x) == "even" else f"{d}: {x}" for d, x in self.layouts) + ")"


Placement = Replicate | Partial | Shard

REPLICATE = Replicate()
PARTIAL = Partial()
SHARED = Shard(())
"""Everything on every rank, each using it for its own part of the work: gradients arrive in parts."""


def local_shape(placement: Placement, shape: Sequence[Any], rank: int) -> tuple[Any, ...]:
    """The shape of the shard of ``rank``; dimensions that are not sharded may be symbolic."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    dims = placement.dims
    return tuple(dims[d].local_size(int(n), rank) if d in dims else n for d, n in enumerate(shape))


def local_index(placement: Placement, shape: Sequence[int], rank: int) -> list[Ranges]:
    """Per dimension, the index ranges of the box that ``rank`` holds."""
    dims = placement.dims if isinstance(placement, Shard) else {}
    return [dims[d].expand(n, rank) if d in dims else ((0, n),) for d, n in enumerate(shape)]


def to_json(placement: Placement) -> Any:
    """A placement as plain data."""
    if isinstance(placement, Shard):
        return {"shard": [{"dim": d, **x.to_json()} for d, x in placement.layouts]}
    return "replicate" if isinstance(placement, Replicate) else "partial"


def from_json(data: Any) -> Placement:
    """The inverse of :func:`to_json`."""
    if data == "replicate":
        return REPLICATE
    if data == "partial":
        return PARTIAL
    return Shard.of({item["dim"]: Layout.from_json(item) for item in data["shard"]})
