"""The device mesh: tensor-parallel ranks, which shard every tensor, and data-parallel ranks, which run other batches.

A mesh has a dimension ``tp``, over which the model is sharded, and may have a dimension ``dp``, over which it is
replicated with other batches. All ranks load, save and compare plans together; a forward pass is one ``tp`` group's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..compat.distributed import flattened_group, root_mesh

TP, DP = "tp", "dp"
MESH_HINT = (
    "make one with init_device_mesh(device_type, (DP, TP), mesh_dim_names=('dp', 'tp')), where DP × TP is the number "
    "of ranks and either may be 1"
)
"""What to do, for errors about meshes."""


@dataclass(frozen=True)
class Groups:
    """The process groups of a mesh.

    Attributes:
        tp: The tensor-parallel ranks: those that a tensor is sharded over.
        dp: The data-parallel ranks: those with the same shards as this one; None without such a dimension.
        world_group: All ranks of the mesh.
        coordinates: For every rank of ``world_group``, in order, its index along ``dp`` and along ``tp``.
    """

    tp: dist.ProcessGroup
    dp: dist.ProcessGroup | None
    world_group: dist.ProcessGroup
    coordinates: tuple[tuple[int, int], ...]


def groups_of(mesh: DeviceMesh) -> Groups:
    """The groups of a mesh with the dimensions ``tp`` and, perhaps, ``dp``.

    Raises:
        ValueError: It has other dimensions, lacks ``tp``, or does not have all ranks. Raised on all ranks.
    """
    names, shape = mesh.mesh_dim_names or (), tuple(mesh.shape)
    seen = f"the mesh has the dimensions {dict(zip(names, shape))}" if names else f"a mesh of {shape} has no names"
    if TP not in names:
        raise ValueError(f"{seen}, and no dimension 'tp' to shard the model over: {MESH_HINT}.")
    others = [name for name in names if name not in (DP, TP)]
    if others:
        known = ", ".join(repr(name) for name in names if name in (DP, TP))
        raise ValueError(f"{seen}; Paraxis uses 'dp' and 'tp' only. Pass the submesh of these: mesh[{known}].")
    world, root = dist.get_world_size(), root_mesh(mesh)
    if root.size() != world:
        raise ValueError(f"{seen}, which are {root.size()} ranks, but there are {world}: {MESH_HINT}.")
    return Groups(
        tp=mesh.get_group(TP),
        dp=mesh.get_group(DP) if DP in names else None,
        world_group=(world_group := _world_group(mesh)),
        coordinates=_coordinates(mesh, world_group),
    )


def _world_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else flattened_group(mesh)


def _coordinates(mesh: DeviceMesh, world_group: dist.ProcessGroup) -> tuple[tuple[int, int], ...]:
    names = mesh.mesh_dim_names or ()
    found = []
    for rank in dist.get_process_group_ranks(world_group):
        (place,) = torch.nonzero(mesh.mesh == rank).tolist()
        at = dict(zip(names, place))
        found.append((at.get(DP, 0), at[TP]))
    return tuple(found)
