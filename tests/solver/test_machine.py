"""Machines: how long collectives take, presets and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from paraxis.solver import PRESETS, Link, Machine, machine_of
from paraxis.solver.machine import COLLECTIVES, DEFAULT, volume


def test_volume_per_rank() -> None:
    assert [volume(kind, 4) for kind in COLLECTIVES] == [1.5, 0.75, 0.75, 0.1875]
    with pytest.raises(ValueError, match="'broadcast' is not a collective"):
        volume("broadcast", 4)


def test_latency_and_bandwidth() -> None:
    machine = Machine("", 1.0, 1.0, Link(0.5, 100.0), {"all_gather": Link(2.0, 10.0)})
    assert machine.collective("all_reduce", 100, 4) == 0.5 + 1.5
    assert machine.collective("all_gather", 100, 4) == 2.0 + 7.5


def test_collectives_run_inside_nodes_first() -> None:
    machine = Machine("", 1.0, 1.0, Link(0.5, 100.0), per_node=4, between=Link(1.0, 10.0))
    inside = Machine("", 1.0, 1.0, Link(0.5, 100.0)).collective("all_reduce", 100, 4)
    assert machine.collective("all_reduce", 100, 4) == inside
    assert machine.collective("all_reduce", 100, 8) == inside + 1.0 + 1.0 * (100 / 4) / 10.0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    machine_of(name).save(tmp_path / "machine.json")
    assert machine_of(tmp_path / "machine.json") == PRESETS[name]


def test_unknown_machines(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="machine='abacus' is neither a preset .*h100.* nor a file; `paraxis calibrate`"
    ):
        machine_of("abacus")
    broken = tmp_path / "broken.json"
    broken.write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="does not describe a machine"):
        machine_of(broken)
    assert machine_of(None) is DEFAULT
