"""FSDP on top of tensor parallelism: the part of a shard that a data-parallel rank stores.

Tensor parallelism gives every rank a *shard* of a parameter. Data-parallel ranks have the same shard, and may store a
*part* of it each, of the gradient and the optimizer's state too: these take most of the memory. Before the shard is
used it is unsharded (all-gather); its gradient is reduced to the parts afterwards (reduce-scatter).
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

MIN_VECTOR_SIZE = 1 << 16
"""Vectors of fewer elements are replicated over the data-parallel ranks: an all-gather costs more than they save."""


@dataclass(frozen=True)
class DPShard:
    """How the data-parallel ranks divide a tensor-parallel shard.

    Attributes:
        placement: The placement of the shard's elements over the data-parallel ranks.
        mesh_placement: The placement of the full tensor's elements over all ranks of the mesh.
        shape: The shape of this rank's shard.
        group: The data-parallel ranks.
        world_group: All ranks of the mesh.
        mesh: The mesh, for DTensors.
        name: Of the parameter: ranks that exchange different parameters must notice.
    """

    placement: Shard
    mesh_placement: Shard
    shape: tuple[int, ...]
    group: dist.ProcessGroup = field(compare=False, repr=False)
    world_group: dist.ProcessGroup = field(compare=False, repr=False)
    mesh: DeviceMesh = field(compare=False, repr=False)
    name: str = field(default="", compare=False)

    @property
    def rank(self) -> int:
        """This rank in the mesh, which indexes ``mesh_placement``."""
        return dist.get_rank(self.world_group)

    @property
    def dim(self) -> int:
        """The dimension that is sharded over the data-parallel ranks."""
        return self.placement.layouts[0][0]

    def unshard(self, part: torch.Tensor) -> torch.Tensor:
        """All-gather the shard from its parts. A collective of the data-parallel ranks."""
        with labelled(self.group, self.name):
            return gather_box(part, self.placement, self.shape, self.group)

    def reshard(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's part of an unsharded shard; a view where possible."""
        return slice_box(shard, self.placement, dist.get_rank(self.group))

    def reduce_scatter(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean of the data-parallel ranks' gradients. A collective of them."""
        scaled = gradient / dist.get_world_size(self.group)
        dim, layout = self.placement.layouts[0]
        with labelled(self.group, self.name):
            if layout.is_even:
                part = reduce_scatter(scaled, self.group, dim)
            else:
                part = dense(self.reshard(all_reduce(scaled, self.group)))
        # Some backends all-reduce instead: a view of the result would keep all of its memory alive.
        return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()


def make_dp_shard(
    name: str, placement: Placement, shape: Sequence[int], groups: Groups, mesh: DeviceMesh
) -> DPShard | None:
    """How data-parallel ranks divide the shards of a parameter; None if it is small, or cannot be divided."""
    assert groups.dp is not None
    tp, dp = dist.get_world_size(groups.tp), dist.get_world_size(groups.dp)
    shape = tuple(shape)
    shards = [local_shape(placement, shape, rank) for rank in range(tp)]
    if dp == 1 or (len(shape) < 2 and max(_numel(s) for s in shards) < MIN_VECTOR_SIZE):
        return None
    dims = [d for d in range(len(shape)) if all(s[d] >= dp for s in shards)]
    even = [d for d in dims if all(s[d] % dp == 0 for s in shards)]
    # An all-gather along the first dimension needs no copy. Where none divides, the longest is the least uneven.
    dim = even[0] if even else max(dims, key=lambda d: shape[d], default=None)
    if dim is None:
        return None
    mine = shards[dist.get_rank(groups.tp)]
    return DPShard(
        placement=Shard.of(dim, Layout.even(mine[dim], dp)),
        mesh_placement=_mesh_placement(placement, shape, shards, dim, dp, groups),
        shape=mine,
        group=groups.dp,
        world_group=groups.world_group,
        mesh=mesh,
        name=name,
    )


def _mesh_placement(
    placement: Placement, shape: tuple[int, ...], shards: list[tuple[int, ...]], dim: int, dp: int, groups: Groups
) -> Shard:
    """The elements of the full tensor that every rank of the mesh stores, as one placement over all of them."""
    layouts = placement.dims if isinstance(placement, Shard) else {}
    found = {}
    for d in {*layouts, dim}:
        ranges: list[Ranges] = []
        for i, j in groups.coordinates:
            spans = layouts[d].expand(shape[d], j) if d in layouts else ((0, shape[d]),)
            if d == dim:
                ((start, stop),) = Layout.even(shards[j][d], dp).expand(shards[j][d], i)
                spans = _subrange(spans, start, stop)
            ranges.append(spans)
        found[d] = Layout.of(shape[d], ranges)
    return Shard.of(found)


def _subrange(spans: Ranges, start: int, stop: int) -> Ranges:
    """Elements ``start`` to ``stop`` of the concatenation of these ranges."""
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
