"""Our plans beside transformers' own: never dearer, never with more on a rank."""

from __future__ import annotations

import os

import pytest

from zoo.plans import compare, dim_of, problems, shipped, style_of

SOME = ["qwen3_moe", "granite_swa"]
"""All of them with ``PARAXIS_ALL=1``: ten minutes."""


@pytest.mark.parametrize("name", shipped() if os.environ.get("PARAXIS_ALL") else SOME)
def test_never_dearer_and_never_less_split(name: str) -> None:
    record = compare(name)
    assert problems(record) == []
    assert not record["given_up"]


def test_a_plan_that_is_dearer_or_holds_more_is_found() -> None:
    assert problems({"cost": [1.0, 1.1], "fraction": [0.5, 0.5]}) == ["costs 1.100e+00 against 1.000e+00"]
    assert problems({"cost": [1.0, 1.0], "fraction": [0.5, 0.6]}) == ["holds 0.6000 against 0.5000"]
    assert problems({"cost": [1.0, 0.9], "fraction": [0.5, 0.5]}) == []


def test_what_their_styles_mean() -> None:
    plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.experts.down_proj": "rowwise"}
    assert style_of(["model.layers.3.mlp.up_proj.weight"], plan) == "colwise"
    assert style_of(["model.layers.0.mlp.experts.down_proj"], plan) == "rowwise"
    assert style_of(["model.norm.weight"], plan) is None
    assert [dim_of("colwise", 2), dim_of("colwise", 1), dim_of("packed_colwise", 3)] == [0, 0, 1]
    assert [dim_of("rowwise", 2), dim_of("rowwise", 1), dim_of("rowwise", 3)] == [1, None, 2]
    assert [dim_of("embedding_rowwise", 2), dim_of("moe_tp_experts", 3), dim_of(None, 2)] == [0, None, None]
