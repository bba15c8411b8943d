"""The mesh of a parallelization: ranks that split every tensor between them, beside ranks that work on other data.

A mesh has a dimension ``tp``, over which the model is split, and may have a dimension ``dp``, over which it is repeated
with other batches. Loading, saving and agreeing concern all its ranks; a forward pass those of one ``tp`` group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

TP, DP = "tp", "dp"
HOW = (
    "make one with init_device_mesh(device_type, (DP, TP), mesh_dim_names=('dp', 'tp')), where DP × TP is the number "
    "of ranks and either may be 1"
)


@dataclass(frozen=True)
class Groups:
    """The process groups of a mesh.

    Attributes:
        tp: The ranks that split a tensor with this one.
        dp: The ranks that hold the same part of the model as this one; None without such a dimension.
        world_group: All ranks of the mesh.
        coordinates: For every rank of ``world_group``, in order, its place along ``dp`` and along ``tp``.
    """

    tp: dist.ProcessGroup
    dp: dist.ProcessGroup | None
    world_group: dist.ProcessGroup
    coordinates: tuple[tuple[int, int], ...]


def groups_of(mesh: DeviceMesh) -> Groups:
    """The groups of a mesh with the dimensions ``tp`` and, perhaps, ``dp``.

    Raises:
        ValueError: It has others, or lacks ``tp``, or does not have all ranks; on all of them, as all have the same.
    """
    names, shape = mesh.mesh_dim_names or (), tuple(mesh.shape)
    seen = f"the mesh has the dimensions {dict(zip(names, shape))}" if names else f"a mesh of {shape} has no names"
    if TP not in names:
        raise ValueError(f"{seen}, and no dimension 'tp' to split the model over: {HOW}.")
    others = [name for name in names if name not in (DP, TP)]
    if others:
        kept = ", ".join(repr(name) for name in names if name in (DP, TP))
        raise ValueError(f"{seen}; Paraxis uses 'dp' and 'tp' alone. Pass the part that has these: mesh[{kept}].")
    world, root = dist.get_world_size(), mesh._get_root_mesh()
    if root.size() != world:
        raise ValueError(f"{seen}, which are {root.size()} ranks, but there are {world}: {HOW}.")
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
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def _coordinates(mesh: DeviceMesh, world_group: dist.ProcessGroup) -> tuple[tuple[int, int], ...]:
    names = mesh.mesh_dim_names or ()
    found = []
    for rank in dist.get_process_group_ranks(world_group):
        (place,) = torch.nonzero(mesh.mesh == rank).tolist()
        at = dict(zip(names, place))
        found.append((at.get(DP, 0), at[TP]))
    return tuple(found)
