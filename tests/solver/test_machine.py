"""Machines: what collectives take on them, and how they are named, written and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Shard
from paraxis.solver import PRESETS, CostModel, Link, Machine, machine_of
from paraxis.solver.machine import COLLECTIVES, DEFAULT, volume

SPLIT = Shard.of(0, Layout.even(8, 4))


def test_what_every_rank_sends() -> None:
    assert [volume(kind, 4) for kind in COLLECTIVES] == [1.5, 0.75, 0.75, 0.1875]
    with pytest.raises(ValueError, match="'broadcast' is not a collective"):
        volume("broadcast", 4)


def test_latency_and_bandwidth() -> None:
    machine = Machine("", 1.0, 1.0, Link(0.5, 100.0), {"all_gather": Link(2.0, 10.0)})
    assert machine.collective("all_reduce", 100, 4) == 0.5 + 1.5
    assert machine.collective("all_gather", 100, 4) == 2.0 + 7.5


def test_nodes_talk_inside_first() -> None:
    machine = Machine("", 1.0, 1.0, Link(0.5, 100.0), per_node=4, between=Link(1.0, 10.0))
    inside = Machine("", 1.0, 1.0, Link(0.5, 100.0)).collective("all_reduce", 100, 4)
    assert machine.collective("all_reduce", 100, 4) == inside
    assert machine.collective("all_reduce", 100, 8) == inside + 1.0 + 1.0 * (100 / 4) / 10.0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_file(name: str, tmp_path: Path) -> None:
    machine_of(name).save(tmp_path / "machine.json")
    assert machine_of(tmp_path / "machine.json") == PRESETS[name]


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="machine='abacus' is neither a preset .*h100.* nor a file; `paraxis calibrate`"
    ):
        machine_of("abacus")
    broken = tmp_path / "broken.json"
    broken.write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="does not describe a machine"):
        machine_of(broken)
    assert machine_of(None) is DEFAULT


def test_the_default_is_what_a_plain_model_has() -> None:
    assert CostModel.on(DEFAULT, 4) == CostModel(world=4)
    slow, fast = CostModel.on(PRESETS["pcie"], 4), CostModel.on(PRESETS["h100"], 4)
    assert slow.move(PARTIAL, REPLICATE, 1e8) > 10 * fast.move(PARTIAL, REPLICATE, 1e8)


def test_gradients_come_back() -> None:
    """What was replicated and used in parts comes back in parts; what was gathered is at hand."""
    model = CostModel(world=4, backward=True)
    reduced, gathered = model.collective("all_reduce", 64), model.collective("all_gather", 64)
    assert model.return_gradient(REPLICATE, SHARED, 64, 1) == reduced
    assert model.return_gradient(REPLICATE, SHARED, 64, 2) == reduced / 2
    assert model.return_gradient(REPLICATE, SPLIT, 64, 1) == model.return_gradient(PARTIAL, SPLIT, 64, 1) == gathered
    assert model.return_gradient(SPLIT, SHARED, 64, 1) == model.collective("reduce_scatter", 64)
    assert model.return_gradient(SPLIT, REPLICATE, 64, 1) == model.return_gradient(PARTIAL, REPLICATE, 64, 1) == 0.0
    assert CostModel(world=4).return_gradient(REPLICATE, SHARED, 64, 1) == 0.0
