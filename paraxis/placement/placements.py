"""Placements: which elements of a *global* tensor each rank holds.

- :class:`Replicate`: every rank holds the full tensor, and every rank computes the same gradient of it.
- :class:`Partial`: every rank holds a tensor of the full shape; the value is their sum.
- :class:`Shard`: every rank holds a box of the tensor: for each sharded dimension, the index ranges of a
  :class:`~paraxis.placement.Layout`.

Gradients follow the placement. The gradient of a replicated tensor is replicated; that of a partial one is replicated
too (every rank's term gets the gradient of the sum). An element of a shard that lives on several ranks has a *partial*
gradient on each of them, and their sum is the gradient. A shard with no sharded dimension at all (:data:`SHARED`) is
therefore not the same as :class:`Replicate`: both hold everything everywhere, but each rank uses a shared tensor for
its own part of the work. Converting a replicated tensor to a shared one is Megatron's *f*: identity forward, all-reduce
backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from .layout import Layout, Ranges, length_of


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the full tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a term of the full shape; the value is the sum over the ranks."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Shard:
    """Every rank holds a box: the ranges of a layout in each sharded dimension, everything in the others.

    ``layouts`` is sorted by dimension and has no full layout in it. Use :meth:`of` to build one.
    """

    layouts: tuple[tuple[int, Layout], ...]

    def __hash__(self) -> int:
        """Computed on first use: compilers trace code that creates placements, and not all of them can trace a hash."""
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
        """The layout of every sharded dimension."""
        return dict(self.layouts)

    @property
    def has_copies(self) -> bool:
        """Some element is on more than one rank."""
        if not self.layouts:
            return True
        # In integers and lists: a compiler traces this in the backward of a redistribution.
        held = 0
        for rank in range(self.world):
            held += prod([length_of(x.ranges[rank]) for _, x in self.layouts])
        return held > prod([x.period for _, x in self.layouts])

    @property
    def world(self) -> int:
        """The number of ranks; 0 if no dimension is sharded."""
        return self.layouts[0][1].world if self.layouts else 0

    def __str__(self) -> str:
        return "S(" + ", ".join(f"{d}" if str(x) == "even" else f"{d}: {x}" for d, x in self.layouts) + ")"


Placement = Replicate | Partial | Shard

REPLICATE = Replicate()
"""The full tensor on every rank."""
PARTIAL = Partial()
"""A term of the full shape on every rank."""
SHARED = Shard(())
"""The full tensor on every rank, each using it for its own part of the work: its gradients are partial."""


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
