"""`paraxis explain`: a placement and its alternatives."""

from __future__ import annotations

import json

from cli.helpers import call


def test_the_text_has_placement_and_costs(folder: str) -> None:
    found = call("explain", folder, "lm_head", "--tp", "2")
    assert found.exit_code == 0, found.output
    assert found.output.startswith("lm_head.weight [96×32] on 2 ranks: sharded on dimension 0 (column)")
    assert "µs per pass" in found.output


def test_alternatives_are_printed_as_json(folder: str) -> None:
    (data,) = json.loads(call("explain", folder, "lm_head", "--tp", "2", "--json").stdout)
    assert data["name"] == "lm_head.weight" and data["alternatives"]
