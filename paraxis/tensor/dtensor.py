"""Sharded tensors as DTensors, which the tools of the PyTorch ecosystem understand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..compat.distributed import strided_shard
from ..distributed.dp_shard import DPShard
from ..distributed.mesh import DP, TP
from ..placement import Layout
from ..placement import Shard as Sharded
from .sharding import full_tensor_of

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor


def as_dtensor(tensor: ShardedTensor) -> DTensor:
    """The same tensor as a DTensor; layouts that DTensor cannot express are gathered and replicated."""
    dp_shard, group = tensor.dp_shard, tensor._spec.group
    mesh: Any = dp_shard.mesh if dp_shard is not None else None
    if mesh is None and group is not None:
        mesh = DeviceMesh.from_group(group, tensor.device.type)
    placement = tensor.placement
    layouts = placement.layouts if isinstance(placement, Sharded) else ()
    plain = len(layouts) < 2 and all(_is_plain(layout, tensor.shape[dim]) for dim, layout in layouts)
    if not plain or (dp_shard is not None and not dp_shard.placement.layouts[0][1].is_even):
        return DTensor.from_local(
            full_tensor_of(tensor).detach(), mesh, [Replicate()] * (2 if dp_shard else 1), run_check=False
        )
    local = tensor._local.detach()
    over_tp = Shard(layouts[0][0]) if layouts else Replicate()
    if dp_shard is None:
        return DTensor.from_local(local, mesh, [over_tp], run_check=False)
    stride = torch.empty(tensor.shape, device="meta").stride()
    placements = _on_mesh(dp_shard, over_tp, layouts[0][1].world if layouts else 1)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=stride)


def _is_plain(layout: Layout, size: int) -> bool:
    """Whether DTensor shards a dimension of this size the same way."""
    return layout.contiguous(size) and layout.is_even


def _on_mesh(dp_shard: DPShard, over_tp: Any, tp_size: int) -> list[Any]:
    """The placements over both dimensions of a mesh; DTensor shards over the first of them first."""
    names = dp_shard.mesh.mesh_dim_names or ()
    over_dp: Any = Shard(dp_shard.dim)
    if over_tp == over_dp and names.index(DP) < names.index(TP):  # Paraxis shards over tp first, then over dp
        over_dp = strided_shard(dp_shard.dim, tp_size)
    placements = {DP: over_dp, TP: over_tp}
    return [placements[name] for name in names]
