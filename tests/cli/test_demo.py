"""`paraxis demo`. Its full run is part of `make demo`."""

from __future__ import annotations

import json

import pytest
from cli.helpers import call

from paraxis.cli import demo


def test_only_rank_0_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks that torchrun has started run the command."""
    report = demo.RankReport(0, 1.0, 2.0, 0.1, 1.0, 100.0, agreed=True)
    monkeypatch.setattr(demo, "launch", lambda *_: [report])
    monkeypatch.setattr(demo, "save_model", lambda _: 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, prints in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        found = call("demo", "--tp", "2")
        assert found.exit_code == 0 and bool(found.stdout) == prints and not found.stderr
    monkeypatch.setenv("RANK", "0")
    assert json.loads(call("demo", "--json").stdout)["agreed"]


def test_a_difference_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "launch", lambda *_: [demo.RankReport(0, 1.0, 2.0, 0.1, 1.0, 100.0)])
    monkeypatch.setattr(demo, "save_model", lambda _: 1)
    found = call("demo")
    assert found.exit_code == 1 and "The parallel model differs from the unsharded model." in found.stdout
