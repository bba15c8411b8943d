"""Private names of ``torch.distributed``, on simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from paraxis.compat import distributed as compat


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process as rank 0 of four, of which the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4, store=compat.simulated_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_every_name_exists() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__)


def test_groups_have_names_and_backends(four_ranks: None) -> None:
    group = compat.default_group()
    assert group is dist.group.WORLD and compat.resolve_process_group(group.group_name) is group
    assert compat.backend_name(group, torch.device("cpu")) == "fake"


def test_meshes_have_a_root_and_one_flat_group(four_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert compat.root_mesh(mesh["tp"]) == mesh and compat.root_mesh(mesh) == mesh
    assert compat.flattened_group(mesh).size() == 4


def test_store_and_timeout_of_gloo() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        group = compat.default_group()
        assert compat.group_timeout(group, torch.device("cpu")).total_seconds() > 60
        assert compat.backend_name(group, torch.device("cpu")) == "gloo"
        compat.default_store().set("key", "value")
        assert compat.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_without_ranks() -> None:
    with pytest.raises(ValueError, match="not been initialized"):
        compat.default_group()
    placement = compat.strided_shard(1, 2)
    assert placement.dim == 1 and placement.split_factor == 2 and placement != Shard(1)
