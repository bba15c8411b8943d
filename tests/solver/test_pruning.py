"""Dropping states: dominated ones, and the least promising beyond a limit."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
import torch
import torch.nn.functional as F
from solver.programs import traced

from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Shard
from paraxis.rules import UNPLACED
from paraxis.solver import Candidates, CostModel, Program
from paraxis.solver.choices import Choices
from paraxis.solver.pruning import PlacementIds, Pruner
from paraxis.solver.search import _tensors

SHARD = Shard.of(1, Layout.even(8, 2))


@pytest.fixture
def program() -> Program:
    return traced(lambda x, w: F.relu(F.linear(x, w)), [torch.empty(4, 8)], [torch.empty(8, 8)], 2)


@pytest.fixture
def pruner(program: Program) -> Pruner:
    choices = Choices(program, Candidates(program), CostModel(), False, None)
    return Pruner(choices, PlacementIds(), _tensors(program))


def test_equal_placements_have_one_number() -> None:
    ids = PlacementIds()
    numbers = [ids.id_of(p) for p in (REPLICATE, SHARD, PARTIAL, SHARED, UNPLACED, Shard.of(1, Layout.even(8, 2)))]
    assert numbers == [0, 1, 2, 3, 4, 1] and ids.placements[1] == SHARD
    assert ids.is_full == [True, False, False, True, True]


def test_a_state_that_another_reaches_for_less_is_dropped(program: Program, pruner: Pruner) -> None:
    activation = program.steps[0].outputs[0]
    replicated, partial = pruner.ids.id_of(REPLICATE), pruner.ids.id_of(PARTIAL)
    move = pruner.model.move(PARTIAL, REPLICATE, 4 * 8 * 4)
    expensive = {(partial,): (1.0, "p"), (replicated,): (1.0 + 2 * move, "r")}
    assert pruner.prune([activation], expensive, Counter([activation]), 64) == ({(partial,): (1.0, "p")}, False)
    cheap = {(partial,): (1.0, "p"), (replicated,): (1.0 + move / 2, "r")}
    assert pruner.prune([activation], cheap, Counter([activation]), 64) == (cheap, False)


def test_states_with_other_parameter_placements_stay(program: Program, pruner: Pruner) -> None:
    (parameter,) = program.parameters
    states = {(pruner.ids.id_of(p),): (cost, None) for p, cost in ((SHARD, 1.0), (REPLICATE, 100.0))}
    assert pruner.prune([parameter], states, Counter([parameter]), 64) == (states, False)


def test_beyond_the_limit_the_most_promising_stay(program: Program, pruner: Pruner) -> None:
    activation = program.steps[0].outputs[0]
    shards = [Shard.of(1, Layout.of(8, [[(0, k)], [(k, 8)]])) for k in range(1, 8)]
    states = {(pruner.ids.id_of(p),): (1.0 + k, k) for k, p in enumerate(shards)}
    pruned, dropped = pruner.prune([activation], states, Counter([activation]), 4)
    assert dropped and sorted(k for _, k in pruned.values()) == [0, 1, 2, 3]


def test_toll_is_the_cheapest_move(program: Program, pruner: Pruner) -> None:
    activation, (parameter,) = program.steps[0].outputs[0], program.parameters
    replicated, shard = pruner.ids.id_of(REPLICATE), pruner.ids.id_of(SHARD)
    assert pruner.toll(activation, replicated, shard, 1) == inf, "no rule may lead there"
    assert pruner.toll(parameter, shard, replicated, 1) == inf, "part of the plan"
    assert pruner.toll(activation, shard, replicated, 1) == pruner.model.move(SHARD, REPLICATE, 4 * 8 * 4)
