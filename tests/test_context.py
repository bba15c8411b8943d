"""The context: groups and ranks of a process group or a mesh, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.meshes import mesh_context
from torch.distributed.device_mesh import init_device_mesh

from paraxis import ParallelExecutionCtx


def describe_mesh(dp: int, tp: int) -> dict[str, Any]:
    """What the context of a mesh says of this rank."""
    ctx = mesh_context(dp, tp)
    return {
        "rank": ctx.rank,
        "world_size": ctx.world_size,
        "dp_rank": ctx.dp_rank,
        "dp_size": ctx.dp_size,
        "is_first": ctx.is_first,
        "all": dist.get_world_size(ctx.world_group),
    }


def test_mesh_has_tensor_parallel_and_data_parallel_ranks(ranks: Any) -> None:
    for rank, found in enumerate(ranks(4).run(describe_mesh, 2, 2)):
        assert found == {
            "rank": rank % 2,
            "world_size": 2,
            "dp_rank": rank // 2,
            "dp_size": 2,
            "is_first": rank == 0,
            "all": 4,
        }


def use_groups() -> dict[str, Any]:
    """Contexts of the default group, of a one-dimensional mesh, and what is refused."""
    group, device = dist.group.WORLD, torch.device("cpu")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    errors = {}
    for name, arguments in {
        "no device": {"tp_group": group},
        "two groups": {"tp_group": dist.new_group(), "current_device": device, "mesh": mesh},
        "two dimensions": {"tp_group": mesh, "current_device": device},
    }.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            ParallelExecutionCtx(**arguments)  # type: ignore[arg-type]
        errors[name] = str(caught.value)
    plain = ParallelExecutionCtx(group, "cpu")  # type: ignore[arg-type]
    of_mesh = ParallelExecutionCtx(mesh["tp"], device)  # type: ignore[arg-type]
    with plain.timed("capture"), plain.timed("capture"):
        pass
    return {
        "errors": errors,
        "device": plain.current_device,
        "same": plain.world_size == of_mesh.world_size == 2 and plain.rank == of_mesh.rank,
        "no_dp": (plain.dp_rank, plain.dp_size) == (0, 1) and plain.world_group is group,
        "timings": list(plain.timings),
        "fresh": plain.state is not of_mesh.state and plain.plan is None and plain.compile_times == 0,
    }


def test_group_and_one_dimensional_mesh_are_the_same(ranks: Any) -> None:
    for found in ranks(2).run(use_groups):
        assert found["device"] == torch.device("cpu") and found["same"] and found["no_dp"] and found["fresh"]
        assert found["timings"] == ["capture"]
        assert "current_device is missing" in found["errors"]["no device"]
        assert "either tp_group or mesh" in found["errors"]["two groups"]
        assert "mesh['tp']" in found["errors"]["two dimensions"]
