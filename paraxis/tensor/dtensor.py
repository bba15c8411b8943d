"""Sharded tensors as DTensors, which the tools of the PyTorch ecosystem know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..distributed.dp_shard import DPShard
from ..distributed.mesh import DP, TP
from ..placement import Layout
from ..placement import Shard as Sharded

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor


def as_dtensor(tensor: ShardedTensor) -> DTensor:
    """The same tensor as a DTensor; layouts that DTensor cannot express are gathered and replicated."""
    from .sharded_tensor import full_tensor_of

    split, group = tensor.dp_shard, tensor._spec.group
    mesh: Any = split.mesh if split is not None else None
    if mesh is None and group is not None:
        mesh = DeviceMesh.from_group(group, tensor.device.type)
    placement = tensor.placement
    layouts = placement.layouts if isinstance(placement, Sharded) else ()
    plain = len(layouts) < 2 and all(_is_plain(layout, tensor.shape[dim]) for dim, layout in layouts)
    if not plain or (split is not None and not split.within.layouts[0][1].is_even):
        return DTensor.from_local(
            full_tensor_of(tensor).detach(), mesh, [Replicate()] * (2 if split else 1), run_check=False
        )
    local = tensor._local.detach()
    across = Shard(layouts[0][0]) if layouts else Replicate()
    if split is None:
        return DTensor.from_local(local, mesh, [across], run_check=False)
    stride = torch.empty(tensor.shape, device="meta").stride()
    places = _on_mesh(split, across, layouts[0][1].world if layouts else 1)
    return DTensor.from_local(local, mesh, places, run_check=False, shape=tensor.shape, stride=stride)


def _is_plain(layout: Layout, size: int) -> bool:
    """Whether it is what DTensor makes of as many ranks."""
    return layout.contiguous(size) and layout.is_even


def _on_mesh(split: DPShard, across: Any, world: int) -> list[Any]:
    """The placements over both dimensions of a mesh; DTensor cuts by the first of them first."""
    names = split.mesh.mesh_dim_names or ()
    along: Any = Shard(split.dim)
    if across == along and names.index(DP) < names.index(TP):  # ours are cut by tp first, and each piece by dp
        along = _StridedShard(split.dim, split_factor=world)
    places = {DP: along, TP: across}
    return [places[name] for name in names]
