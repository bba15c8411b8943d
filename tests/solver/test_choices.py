"""The ways to run a step, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from solver.programs import traced

from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Shard
from paraxis.rules import UNPLACED
from paraxis.solver import Candidates, CostModel, Program
from paraxis.solver.choices import Choices

EVEN = Layout.even(8, 2)
COLUMN, ROW = Shard.of(0, EVEN), Shard.of(1, EVEN)


@pytest.fixture
def program() -> Program:
    return traced(lambda x, w: F.relu(F.linear(x, w)), [torch.empty(4, 8)], [torch.empty(8, 8)], 2)


def choices_for(program: Program, sequence: bool = False, permit: Any = None, **model: Any) -> Choices:
    return Choices(program, Candidates(program), CostModel(**model), sequence, permit)


def test_initial_placements(program: Program) -> None:
    x, w = program.leaves
    choices = choices_for(program)
    assert choices.initial(x) == REPLICATE and choices.initial(w) is UNPLACED
    program.placements[w] = ROW
    assert choices.initial(w) == ROW


def test_an_unplaced_weight_may_be_sharded_either_way(program: Program) -> None:
    linear = program.steps[0]
    found = {c.strategy.kind: c for c in choices_for(program).of(linear, (REPLICATE, UNPLACED))}
    assert set(found) == {"", "column", "row"}
    assert found["column"].after == (REPLICATE, COLUMN) and found["column"].strategy.inputs[0] == SHARED
    assert found["row"].strategy.outputs == (PARTIAL,) and found[""].after == (REPLICATE, REPLICATE)
    assert found[""].cost > found["column"].cost, "a replicated weight has a price"
    assert found["row"].placements(linear)[linear.outputs[0]] == PARTIAL


def test_inputs_are_moved_where_the_strategy_needs_them(program: Program) -> None:
    model = CostModel()
    relu = program.steps[1]
    found = {c.strategy.outputs: c for c in choices_for(program).of(relu, (PARTIAL,))}
    reduced = found[(REPLICATE,)]
    assert reduced.before == (PARTIAL,) and reduced.after == (REPLICATE,)
    assert reduced.cost >= model.collective("all_reduce", 4 * 8 * 4)


def test_permit_rules_out_choices(program: Program) -> None:
    choices = choices_for(program, permit=lambda step, strategy, before, after: strategy.kind == "row")
    assert [c.strategy.kind for c in choices.of(program.steps[0], (REPLICATE, UNPLACED))] == ["row"]


def test_partial_activations_are_scattered_on_the_sequence() -> None:
    program = traced(lambda x, w: F.relu(F.linear(x, w)), [torch.empty(2, 8, 8)], [torch.empty(8, 8)], 2)
    relu = program.steps[1]
    scattered = (Shard.of(1, EVEN),)
    assert scattered not in [c.strategy.outputs for c in choices_for(program).of(relu, (PARTIAL,))]
    found = {c.strategy.outputs: c for c in choices_for(program, sequence=True).of(relu, (PARTIAL,))}
    assert found[scattered].cost < found[(REPLICATE,)].cost


def test_impure_steps_run_replicated(program: Program) -> None:
    relu = program.steps[1]
    relu.node.meta["impure"] = True
    assert [c.strategy.outputs for c in choices_for(program).of(relu, (COLUMN,))] == [(REPLICATE,)]
