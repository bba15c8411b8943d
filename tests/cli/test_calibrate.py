"""`paraxis calibrate`: the file it writes is a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.helpers import call

from paraxis.cli.calibrate import LARGE, SMALL, link_of
from paraxis.solver import machine_of


def test_measured_machine(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    found = call("calibrate", "--tp", "2", "--out", str(out))
    assert found.exit_code == 0, found.output
    machine = machine_of(out)
    assert machine.flops > 1e8 and machine.memory > 1e7
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert 1e-7 < machine.links[kind].latency < 1.0 and machine.links[kind].bandwidth > 1e6
    assert "2 ranks, measured on" in machine.name
    assert "all-reduce: latency " in found.stdout and f"Wrote {out}." in " ".join(found.stdout.split())


def test_latency_and_bandwidth_of_a_collective() -> None:
    link = link_of("all_gather", 1e-5, 1e-5 + 1e-3, 2)
    assert link.latency == 1e-5 and link.bandwidth == pytest.approx((LARGE - SMALL) * 4 / 2 / 1e-3)
