"""What a solution takes: seconds, collectives, bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from solver.programs import sharded_dims, transformer_program

from paraxis.placement import Placement
from paraxis.rules import Tensor
from paraxis.solver import CostModel, Program, Solution, account, search
from paraxis.solver.account import parameter_bytes

DOWN, HEAD = "layers.0.mlp.down.weight", "head.weight"


@pytest.fixture(scope="module")
def program() -> Program:
    return transformer_program()


def placed_parameters(program: Program, solution: Solution) -> Iterator[tuple[Tensor, Placement]]:
    seen = set()
    for step in program.steps:
        for value, tensor in zip(step.inputs, step.call.inputs if step.call else ()):
            if value in program.parameters and value not in seen:
                seen.add(value)
                yield tensor, solution.parameters[value]


def test_the_account_is_the_cost_without_prices(program: Program) -> None:
    model = CostModel(world=4).without_prices()
    solution = search(program, model)[0]
    stored = sum(model.store(tensor, placement, True) for tensor, placement in placed_parameters(program, solution))
    found = account(program, solution, model)
    assert found.seconds + stored == pytest.approx(solution.cost)
    assert found.seconds == pytest.approx(sum(found.compute.values()) + found.communication)
    assert sum(found.collectives.values()) == len(found.sent)


def test_training_counts_the_backward_pass(program: Program) -> None:
    plain, back = CostModel(world=4), CostModel(world=4, backward=True)
    forward, both = (search(program, model)[0] for model in (plain, back))
    assert both.optimal and both.cost > 1.5 * forward.cost
    spent = account(program, both, back)
    assert spent.communication > 1.5 * account(program, forward, plain).communication
    assert sharded_dims(program, both, DOWN) == [1] and sharded_dims(program, both, HEAD) == [0]


def test_the_bytes_of_repeated_parameters_count_as_often(program: Program) -> None:
    model = CostModel(world=4)
    solution = search(program, model)[0]
    once = parameter_bytes(program, solution, model, {})
    assert parameter_bytes(program, solution, model, {DOWN: 11}) == once + 10 * (32 * 64 * 4 // 4)
