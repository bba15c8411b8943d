"""Process groups of a device mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from paraxis import ParallelExecutionCtx
from paraxis.distributed.mesh import groups_of


def wrong_meshes() -> dict[str, str]:
    found = {}
    for key, shape, names in (
        ("no tp", (2, 2), ("dp", "mp")),
        ("another", (1, 2, 2), ("pp", "dp", "tp")),
        ("too small", (1, 2), ("dp", "tp")),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(ValueError) as error:
            ParallelExecutionCtx(mesh=mesh, current_device=torch.device("cpu"))
        found[key] = str(error.value)
    return found


def test_meshes_that_do_not_fit(ranks: Any) -> None:
    for found in ranks(4).run(wrong_meshes):
        assert "no dimension 'tp'" in found["no tp"] and "{'dp': 2, 'mp': 2}" in found["no tp"]
        assert "mesh['dp', 'tp']" in found["another"]
        assert "2 ranks, but there are 4" in found["too small"]


def groups() -> tuple[list[int], list[int], Any]:
    submesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
    ctx = ParallelExecutionCtx(mesh=submesh, current_device=torch.device("cpu"))
    assert (ctx.dp_size, ctx.world_size, dist.get_world_size(ctx.world_group)) == (2, 2, 4)
    found = groups_of(submesh)
    assert found.dp is not None
    return dist.get_process_group_ranks(found.tp), dist.get_process_group_ranks(found.dp), found.coordinates


def test_groups_and_coordinates(ranks: Any) -> None:
    for rank, (tp, dp, coordinates) in enumerate(ranks(4).run(groups)):
        assert tp == [rank // 2 * 2, rank // 2 * 2 + 1] and dp == [rank % 2, rank % 2 + 2]
        assert coordinates == ((0, 0), (0, 1), (1, 0), (1, 1))


def without_dp() -> bool:
    return groups_of(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))).dp is None


def test_a_mesh_without_data_parallel_ranks(ranks: Any) -> None:
    assert ranks(2).run(without_dp) == [True, True]
