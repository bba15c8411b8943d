"""What the user wants of a plan: constraints, a limit of memory, an objective, and what cannot be had together."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from solver.programs import Transformer, compiled_call_of
from transformers import LlamaConfig

from paraxis import compare_plans, plan_model
from paraxis.placement import Shard
from paraxis.solver import ConstraintError, CostModel, Program, Solution, Wanted, account, search, solve
from paraxis.solver.account import parameter_bytes
from paraxis.solver.constraints import check_names, parse, weight_axes

DOWN, HEAD, EMBED = "layers.0.mlp.down.weight", "head.weight", "embed.weight"


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled_call_of(Transformer(layers=2), torch.zeros(2, 8, dtype=torch.long), world=4)


def solved(program: Program, wishes: Any = None, limit: int | None = None, **model: Any) -> Solution:
    return solve(program, CostModel(world=4, **model), Wanted(parse(wishes), memory_limit=limit))[0]


def dims(program: Program, solution: Solution, name: str) -> list[int]:
    placement = next(p for v, p in solution.parameters.items() if program.parameters[v] == name)
    return [d for d, _ in placement.layouts] if isinstance(placement, Shard) else []


def test_axes_are_dimensions_of_the_weight(program: Program) -> None:
    axes = {program.parameters[v]: a for v, a in weight_axes(program).items()}
    assert axes[DOWN] == {"column": 0, "row": 1}
    assert axes[EMBED] == {"vocab": 0}
    assert "norm.weight" not in axes


@pytest.mark.parametrize(
    ("wishes", "name", "expected"),
    [
        ({}, DOWN, [1]),
        ({"*.down": "column"}, DOWN, [0]),
        ({"layers.0.mlp.down": "not row"}, DOWN, [0]),
        ({"layers.0.mlp.down.weight": "shard(0)"}, DOWN, [0]),
        ({"head": "row"}, HEAD, [1]),
        ({"head": ["not row", "not column"]}, HEAD, []),
        ({"embed": "whole"}, EMBED, []),
    ],
)
def test_wishes_hold(program: Program, wishes: Any, name: str, expected: list[int]) -> None:
    plain, wanted = solved(program), solved(program, wishes)
    assert dims(program, wanted, name) == expected
    assert wanted.cost >= plain.cost and wanted.optimal
    assert (wanted.cost > plain.cost) == bool(wishes)


def test_one_layer_alone(program: Program) -> None:
    wanted = solved(program, {"layers.1.mlp.down": "column"})
    assert dims(program, wanted, DOWN) == [1]
    assert dims(program, wanted, "layers.1.mlp.down.weight") == [0]


def test_conflicting_wishes_are_named(program: Program) -> None:
    wishes = {"*.down": "column", "embed": "vocab", "layers.1.*": "row", "head": "not whole"}
    text = (
        "these constraints cannot hold together over 4 ranks: '*.down': column; 'layers.1.*': row. No way to run the "
        "operator on layers.1.mlp.down.weight (32, 64) is left; drop one of them."
    )
    with pytest.raises(ConstraintError, match=re.escape(text)):
        solved(program, wishes)


def test_a_wish_that_no_operator_can_fulfil(program: Program) -> None:
    text = "this constraint cannot hold over 4 ranks: 'embed': shard(1). No way to run the operator on embed.weight (96"
    with pytest.raises(ConstraintError, match=re.escape(text)):
        solved(program, {"embed": "shard(1)"})


@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        ({"head": "diagonal"}, "constraint 'head': 'diagonal' is not a wish: use 'column', 'row', 'vocab'"),
        ({"norm": "column"}, "constraint 'norm': column: norm.weight is not the weight of a layer that can be column"),
        ({"head": "vocab"}, "head.weight is not the weight of a layer that can be vocab-parallel"),
    ],
)
def test_wishes_that_mean_nothing(program: Program, wishes: Any, text: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(text)):
        solved(program, wishes)


def test_names_that_nothing_has() -> None:
    names = {"embed.weight": ["embed.weight", "head.weight"], "up.weight": ["up.weight"]}
    check_names(parse({"head": "whole", "u*": "split"}), names)
    with pytest.raises(
        ConstraintError, match="'haed': whole: no parameter or module has such a name. Did you mean 'head'"
    ):
        check_names(parse({"haed": "whole"}), names)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_with_room_for_all_nothing_need_be_sent(program: Program) -> None:
    """So small a model is fastest where it is whole; with less room it is split as far as it has to be."""
    model = CostModel(world=4)
    sizes = []
    for limit in (10**9, 80_000, 50_000):
        found = solved(program, limit=limit)
        sizes.append(parameter_bytes(program, found, model, {}))
        assert sizes[-1] <= limit
    whole, some, least = sizes
    assert whole > some >= least
    assert not account(program, solved(program, limit=10**9), model).collectives


def test_what_repeats_counts_as_often(program: Program) -> None:
    model, found = CostModel(world=4), solved(program)
    once = parameter_bytes(program, found, model, {})
    assert parameter_bytes(program, found, model, {DOWN: 11}) == once + 10 * (32 * 64 * 4 // 4)


def test_a_limit_that_cannot_hold(program: Program) -> None:
    with pytest.raises(
        ConstraintError, match=re.escape("memory_limit=1000 (1000 bytes) cannot hold: split over 4 ranks")
    ):
        solved(program, limit=1000)
    text = (
        "cannot hold together with the constraint 'embed': whole: split over 4 ranks, the parameters of a rank take 35"
    )
    with pytest.raises(ConstraintError, match=re.escape(text)):
        solved(program, {"head": "split", "embed": "whole"}, limit=30_000)


# -- machines and objectives -----------------------------------------------------------------------------------------


def test_training_counts_the_backward_pass(program: Program) -> None:
    plain, back = CostModel(world=4), CostModel(world=4, backward=True)
    forward, both = (search(program, model)[0] for model in (plain, back))
    assert both.optimal and both.cost > 1.5 * forward.cost
    spent = account(program, both, back)
    assert spent.communication > 1.5 * account(program, forward, plain).communication
    assert dims(program, both, DOWN) == [1] and dims(program, both, HEAD) == [0]


def test_objectives_may_differ_in_their_best_plan() -> None:
    """Where computing is slow and sending is dear, a long sequence is worth more collectives than a short one."""
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


def test_the_account_is_the_cost_without_prices(program: Program) -> None:
    model = CostModel(world=4).without_prices()
    solution = search(program, model)[0]
    kept = sum(model.keep(v_tensor, p, True) for v_tensor, p in _kept(program, solution))
    assert account(program, solution, model).seconds + kept == pytest.approx(solution.cost)


def _kept(program: Program, solution: Solution) -> Any:
    seen = set()
    for step in program.steps:
        for value, tensor in zip(step.inputs, step.call.inputs if step.call else ()):
            if value in program.parameters and value not in seen:
                seen.add(value)
                yield tensor, solution.parameters[value]
