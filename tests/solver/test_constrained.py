"""The cheapest plan under constraints and a memory limit, and constraints that cannot hold together."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from solver.programs import sharded_dims, transformer_program
from transformers import LlamaConfig

from paraxis import compare_plans, plan_model
from paraxis.solver import ConstraintError, CostModel, Program, Requirements, Solution, account, solve
from paraxis.solver.account import parameter_bytes
from paraxis.solver.constraints import parse

DOWN, HEAD, EMBED = "layers.0.mlp.down.weight", "head.weight", "embed.weight"


@pytest.fixture(scope="module")
def program() -> Program:
    return transformer_program()


def solved(program: Program, constraints: Any = None, limit: int | None = None) -> Solution:
    return solve(program, CostModel(world=4), Requirements(parse(constraints), memory_limit=limit))[0]


@pytest.mark.parametrize(
    ("constraints", "name", "expected"),
    [
        ({}, DOWN, [1]),
        ({"*.down": "column"}, DOWN, [0]),
        ({"layers.0.mlp.down": "not row"}, DOWN, [0]),
        ({"layers.0.mlp.down.weight": "shard(0)"}, DOWN, [0]),
        ({"head": "row"}, HEAD, [1]),
        ({"head": ["not row", "not column"]}, HEAD, []),
        ({"embed": "replicated"}, EMBED, []),
    ],
)
def test_constraints_hold(program: Program, constraints: Any, name: str, expected: list[int]) -> None:
    plain, constrained = solved(program), solved(program, constraints)
    assert sharded_dims(program, constrained, name) == expected
    assert constrained.cost >= plain.cost and constrained.optimal
    assert (constrained.cost > plain.cost) == bool(constraints)


def test_a_constraint_on_one_layer_leaves_the_others(program: Program) -> None:
    constrained = solved(program, {"layers.1.mlp.down": "column"})
    assert sharded_dims(program, constrained, DOWN) == [1]
    assert sharded_dims(program, constrained, "layers.1.mlp.down.weight") == [0]


def test_conflicting_constraints_are_named(program: Program) -> None:
    constraints = {"*.down": "column", "embed": "vocab", "layers.1.*": "row", "head": "sharded"}
    text = (
        "these constraints cannot hold together over 4 ranks: '*.down': column; 'layers.1.*': row. No way to run the "
        "operator on layers.1.mlp.down.weight (32, 64) is left; drop one of them."
    )
    with pytest.raises(ConstraintError, match=re.escape(text)):
        solved(program, constraints)


def test_a_constraint_that_no_operator_can_satisfy(program: Program) -> None:
    text = "this constraint cannot hold over 4 ranks: 'embed': shard(1). No way to run the operator on embed.weight (96"
    with pytest.raises(ConstraintError, match=re.escape(text)):
        solved(program, {"embed": "shard(1)"})


def test_an_axis_of_another_layer(program: Program) -> None:
    with pytest.raises(ConstraintError, match="norm.weight is not the weight of a layer that can be column-parallel"):
        solved(program, {"norm": "column"})


# -- memory ----------------------------------------------------------------------------------------------------------


def test_parameters_are_replicated_as_far_as_they_fit(program: Program) -> None:
    """So small a model is fastest replicated; with less memory it is sharded as far as necessary."""
    model = CostModel(world=4)
    sizes = []
    for limit in (10**9, 80_000, 50_000):
        found = solved(program, limit=limit)
        sizes.append(parameter_bytes(program, found, model, {}))
        assert sizes[-1] <= limit
    replicated, some, least = sizes
    assert replicated > some >= least
    assert not account(program, solved(program, limit=10**9), model).collectives


def test_a_limit_that_cannot_hold(program: Program) -> None:
    with pytest.raises(
        ConstraintError, match=re.escape("memory_limit=1000 (1000 bytes) cannot hold: sharded over 4 ranks")
    ):
        solved(program, limit=1000)
    text = (
        "cannot hold together with the constraint 'embed': replicated: sharded over 4 ranks, the parameters of a rank "
        "take at least 35"
    )
    with pytest.raises(ConstraintError, match=re.escape(text)):
        solved(program, {"head": "sharded", "embed": "replicated"}, limit=30_000)


# -- objectives ------------------------------------------------------------------------------------------------------


def test_objectives_may_differ_in_their_best_plan() -> None:
    """Where compute is slow and communication expensive, a long sequence is worth more collectives than a short one."""
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=96
    )
    plans = []
    for objective in ("prefill", "decode"):
        plans.append(plan_model(config, 4, machine="cpu", objective=objective))
        torch._dynamo.reset()
    long, short = plans
    assert short.count() == {"all_reduce": 3, "all_gather": 1}
    assert long.count()["reduce_scatter"] and long.seconds > short.seconds
    assert compare_plans(long, short)
