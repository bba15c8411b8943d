"""Comparing plans: the text names layers, parameters and collectives that differ."""

from __future__ import annotations

import torch
from solver.programs import Transformer

from paraxis import compare_plans, plan_model
from paraxis.placement import REPLICATE, Layout, Shard
from paraxis.plan import CollectivePlan, LayerPlan, ParameterPlan, Plan

IDS = (torch.zeros(2, 8, dtype=torch.long),)


def test_two_plans_of_a_model() -> None:
    first, second = (
        plan_model(Transformer(layers=4), 4, example_inputs=IDS, constraints=constraints)
        for constraints in (None, {"*.down": "column", "head": "replicated"})
    )
    text = compare_plans(first, second).text()
    assert "layer layers.*.mlp.down (×4): row | column" in text
    assert "layer head: column | replicated" in text
    assert "collective all-reduce after layers.*.mlp.down: 4 | 0" in text
    assert "Estimated time per forward pass: " in text and "Parameters per rank: " in text
    assert second.seconds > first.seconds > first.communication > 0
    torch._dynamo.reset()


def plan(ranks: int, axis: str | None, sharded: bool) -> Plan:
    """A plan with one layer, and a parameter of a module that is no layer."""
    placement = Shard.of(0, Layout.even(8, 2)) if sharded else REPLICATE
    return Plan(
        ranks,
        layers=[LayerPlan("blocks.0.down", "linear", axis, axis == "row", axis == "row", False, (8, 8), (8, 4))],
        parameters={"blocks.0.scale": ParameterPlan(placement, (8,), (4,) if sharded else (8,))},
        collectives=[CollectivePlan("all_reduce", "blocks.0.down", (2, 8), "float32")] if axis == "row" else [],
        seconds=2e-6,
    )


def test_equal_plans_have_no_differences() -> None:
    found = compare_plans(plan(2, "row", True), plan(2, "row", True))
    assert not found and found.text().startswith("Both plans have the same placements.\n")


def test_every_kind_of_difference() -> None:
    found = compare_plans(plan(2, "row", True), plan(4, None, False))
    assert [(d.what, d.where, d.first, d.second) for d in found.differences] == [
        ("ranks", "", "2", "4"),
        ("layer", "blocks.*.down", "row", "replicated"),
        ("parameter", "blocks.*.scale", "sharded on dimension 0 (even)", "replicated"),
        ("collective", "all-reduce after blocks.*.down", "1", "0"),
    ]
    assert found.to_json()["cost"]["seconds"] == (2e-6, 2e-6)
