"""Parameters that data-parallel ranks split between them: the part that a rank keeps, and the shard it computes with.

Tensor parallelism gives every rank a *shard* of a parameter. Ranks that work on other data have the same shard, and may
keep a part of it each: together with the gradient and the optimizer's state that is what takes most memory. Before the
shard is used, the parts are gathered; afterwards its gradient is averaged and scattered back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..placement import Layout, Placement, Range, Ranges, Shard, local_shape
from .collectives import all_reduce, dense, reduce_scatter
from .mesh import Groups
from .redistribute import gather_box, slice_box
from .shared_memory import labelled

SMALL = 1 << 16
"""Vectors of fewer elements stay whole: gathering them takes longer than keeping them is worth."""


@dataclass(frozen=True)
class DPShard:
    """How a shard is split further over the data-parallel ranks.

    Attributes:
        within: The parts of the shard, one per data-parallel rank.
        held: The parts of the whole tensor, one per rank of the mesh.
        shape: The shape of this rank's shard.
        group: The data-parallel ranks.
        world_group: All ranks of the mesh.
        mesh: The mesh, for DTensors.
        name: Of the parameter: ranks that all_gather_object different ones must notice.
    """

    within: Shard
    held: Shard
    shape: tuple[int, ...]
    group: dist.ProcessGroup = field(compare=False, repr=False)
    world_group: dist.ProcessGroup = field(compare=False, repr=False)
    mesh: DeviceMesh = field(compare=False, repr=False)
    name: str = field(default="", compare=False)

    @property
    def rank(self) -> int:
        """This rank among all of the mesh: whose part of ``held`` is here."""
        return dist.get_rank(self.world_group)

    @property
    def dim(self) -> int:
        """The dimension that is split over the data-parallel ranks."""
        return self.within.layouts[0][0]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The shard, from the parts of it. A collective of the data-parallel ranks."""
        with labelled(self.group, self.name):
            return gather_box(part, self.within, self.shape, self.group)

    def take(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's part of a shard that it has."""
        return slice_box(shard, self.within, dist.get_rank(self.group))

    def average(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean of what the data-parallel ranks have. A collective of them."""
        scaled = shard / dist.get_world_size(self.group)
        dim, layout = self.within.layouts[0]
        with labelled(self.group, self.name):
            if layout.is_even:
                part = reduce_scatter(scaled, self.group, dim)
            else:
                part = dense(self.take(all_reduce(scaled, self.group)))
        # Some backends sum all of it, of which a view would keep the memory.
        return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()


def dp_shard_over(
    name: str, placement: Placement, shape: Sequence[int], groups: Groups, mesh: DeviceMesh
) -> DPShard | None:
    """How to split the shards of a parameter over the data-parallel ranks; None if it is small, or cannot be split."""
    assert groups.dp is not None
    tp, dp = dist.get_world_size(groups.tp), dist.get_world_size(groups.dp)
    shape = tuple(shape)
    shards = [local_shape(placement, shape, rank) for rank in range(tp)]
    if dp == 1 or (len(shape) < 2 and max(_numel(s) for s in shards) < SMALL):
        return None
    dims = [d for d in range(len(shape)) if all(s[d] >= dp for s in shards)]
    even = [d for d in dims if all(s[d] % dp == 0 for s in shards)]
    # The first dimension is gathered without a copy. Where none divides, the longest is the least uneven.
    dim = even[0] if even else max(dims, key=lambda d: shape[d], default=None)
    if dim is None:
        return None
    mine = shards[dist.get_rank(groups.tp)]
    return DPShard(
        within=Shard.of(dim, Layout.even(mine[dim], dp)),
        held=_held(placement, shape, shards, dim, dp, groups),
        shape=mine,
        group=groups.dp,
        world_group=groups.world_group,
        mesh=mesh,
        name=name,
    )


def _held(
    placement: Placement, shape: tuple[int, ...], shards: list[tuple[int, ...]], dim: int, dp: int, groups: Groups
) -> Shard:
    """The part of the whole that every rank of the mesh holds, as one placement over all of them."""
    layouts = placement.dims if isinstance(placement, Shard) else {}
    found = {}
    for d in {*layouts, dim}:
        ranges: list[Ranges] = []
        for i, j in groups.coordinates:
            spans = layouts[d].expand(shape[d], j) if d in layouts else ((0, shape[d]),)
            if d == dim:
                ((start, stop),) = Layout.even(shards[j][d], dp).expand(shards[j][d], i)
                spans = _stretch(spans, start, stop)
            ranges.append(spans)
        found[d] = Layout.of(shape[d], ranges)
    return Shard.of(found)


def _stretch(spans: Ranges, start: int, stop: int) -> Ranges:
    """The indices that come as number ``start`` to ``stop`` in these ranges."""
    found: list[Range] = []
    before = 0
    for a, b in spans:
        low, high = max(start - before, 0), min(stop - before, b - a)
        if low < high:
            found.append((a + low, a + high))
        before += b - a
    return tuple(found)


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
