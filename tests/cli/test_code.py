"""`paraxis code`: the local program of a rank."""

from __future__ import annotations

import ast
import json

from cli.helpers import call


def test_the_program_of_a_rank(folder: str) -> None:
    """It parses, is grouped by module, and shows every collective of the plan with its reason."""
    found = call("code", folder, "--tp", "2", "--rank", "1")
    assert found.exit_code == 0
    ast.parse(found.stdout)
    plan = json.loads(call("plan", folder, "--tp", "2", "--json").stdout)
    assert found.stdout.count("<== COLLECTIVE") == len(plan["collectives"])
    assert "# The local program of rank 1 of 2." in found.stdout
    assert "\n    # model.layers.0.self_attn\n" in found.stdout
    assert "RowParallelLinear['model.layers.0.mlp.down_proj']" in found.stdout
    assert "Partial; weight [32, 32] of [32, 64]" in found.stdout
    assert "COLLECTIVE: partial output of a row-parallel layer" in found.stdout
