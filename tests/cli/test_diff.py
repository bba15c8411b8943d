"""`paraxis diff`: two saved plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.helpers import call

from paraxis.plan import LayerPlan, Plan


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two plans that differ in one layer."""
    for name, axis in (("a", "row"), ("b", "column")):
        layer = LayerPlan("model.layers.0.mlp.down_proj", "linear", axis, True, axis == "row", False, (8, 8), (8, 4))
        Plan(2, layers=[layer], seconds=1e-6).save(str(tmp_path / name))
    return [str(tmp_path / name) for name in "ab"]


def test_differences_are_one_line_each(files: list[str]) -> None:
    found = call("diff", *files)
    assert found.exit_code == 0 and "layer model.layers.*.mlp.down_proj: row | column" in found.output
    assert call("diff", files[0], files[0]).output.startswith("Both plans have the same placements.")


def test_differences_are_printed_as_json(files: list[str]) -> None:
    (difference,) = json.loads(call("diff", *files, "--json").stdout)["differences"]
    assert (difference["what"], difference["first"], difference["second"]) == ("layer", "row", "column")
