"""Our plans against those of transformers: never more expensive, never with more on a rank."""

from __future__ import annotations

import pytest

from zoo.plans import compare, dim_of, problems, shipped, style_of

ALWAYS = ("qwen3_moe", "granite_swa")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With ``--long`` all types that ship with a plan, which takes ten minutes: to find them, all are built."""
    if "shipped_type" in metafunc.fixturenames:
        metafunc.parametrize("shipped_type", shipped() if metafunc.config.getoption("--long") else ALWAYS)


def test_plan_costs_and_holds_no_more_than_theirs(shipped_type: str) -> None:
    record = compare(shipped_type)
    assert problems(record) == []
    assert not record["dropped"]


def test_higher_cost_and_larger_fraction_are_problems() -> None:
    assert problems({"cost": [1.0, 1.1], "fraction": [0.5, 0.5]}) == ["costs 1.100e+00 against 1.000e+00"]
    assert problems({"cost": [1.0, 1.0], "fraction": [0.5, 0.6]}) == ["holds 0.6000 against 0.5000"]
    assert problems({"cost": [1.0, 0.9], "fraction": [0.5, 0.5]}) == []


def test_styles_name_the_sharded_dimension() -> None:
    plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.experts.down_proj": "rowwise"}
    assert style_of(["model.layers.3.mlp.up_proj.weight"], plan) == "colwise"
    assert style_of(["model.layers.0.mlp.experts.down_proj"], plan) == "rowwise"
    assert style_of(["model.norm.weight"], plan) is None
    assert [dim_of("colwise", 2), dim_of("colwise", 1), dim_of("packed_colwise", 3)] == [0, 0, 1]
    assert [dim_of("rowwise", 2), dim_of("rowwise", 1), dim_of("rowwise", 3)] == [1, None, 2]
    assert [dim_of("embedding_rowwise", 2), dim_of("moe_tp_experts", 3), dim_of(None, 2)] == [0, None, None]
