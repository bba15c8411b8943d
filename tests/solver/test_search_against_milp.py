"""The search against the optimum of an integer program: random graphs, and one block of real architectures."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from solver.exhaustive import cheapest
from solver.graphs import random_graph
from solver.milp import optimum
from solver.programs import compiled_call_of, random_program, traced
from zoo.tiny import tiny_config

from paraxis.placement import Layout, Shard
from paraxis.solver import CostModel, Program, Solution, pruning, search

MODELS = [
    CostModel(latency=1e-9, replication=1e-12),
    CostModel(latency=1e-10, bandwidth=1e9, replication=0.0, flops=1e9, memory=1e9),
    CostModel(latency=1e-7, bandwidth=1e8, replication=1e-9, detour=0.0),
]
"""Beside the default, in which latency and the memory of replicated parameters decide."""


def assert_optimal(program: Program, model: CostModel) -> Solution:
    """The search finds the optimum of the integer program (``abs=0``: costs are tiny)."""
    solution, _ = search(program, model)
    assert solution.cost == pytest.approx(optimum(program, model), rel=1e-6, abs=0.0)
    return solution


@pytest.mark.parametrize("seed", range(4))
def test_the_formulation_agrees_with_brute_force(seed: int) -> None:
    program = random_program(seed)
    for model in (CostModel(), *MODELS):
        assert optimum(program, model) == pytest.approx(cheapest(program, model, True), rel=1e-9, abs=0.0)


# -- random graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_random_graphs(seed: int) -> None:
    world = (2, 3, 4)[seed % 3]
    program = random_graph(seed, world, length=6 + seed % 8, twice=seed % 2 == 0)
    for model in (CostModel(), MODELS[seed % len(MODELS)]):
        assert_optimal(program, replace(model, world=world))


# -- one block of real architectures -------------------------------------------------------------------------------

ONE = {"num_hidden_layers": 1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": ONE,  # grouped queries
    "gpt2": {"n_layer": 1},  # packed, weights transposed
    "gpt_neox": ONE,  # packed by head, attention and MLP side by side
    "bloom": {"n_layer": 1},  # positions as a bias of the scores
    "opt": ONE,  # biases, learned positions
    "phi3": ONE,  # packed, gate and up too
    "falcon": ONE,  # one key/value head
    "mixtral": ONE,  # experts
    "gemma2": ONE,  # capped scores, a norm on either side
    "olmo2": ONE,  # norms over all heads
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_has_the_optimum_of_the_milp(name: str) -> None:
    """Embedding, one block and head, as captured."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(name, **ARCHITECTURES[name])).eval()
    try:
        captured = compiled_call_of(model, torch.zeros(2, 10, dtype=torch.long))
    finally:
        torch._dynamo.reset()
    for world in (2, 3, 4) if name == "llama" else (2,):
        program = Program(captured.graph, {v.node: n for v, n in captured.parameters.items()}, {}, world)
        assert assert_optimal(program, CostModel(world=world)).optimal


SEARCH = importlib.import_module("paraxis.solver.search")


def test_the_second_pass_finds_what_the_first_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first pass that follows two states often misses the optimum; the second one, bounded by it, does not."""
    monkeypatch.setattr(SEARCH, "BEAM_WIDTH", 2)
    missed = 0
    for seed in range(30):
        program = random_graph(seed)
        assert assert_optimal(program, CostModel()).optimal
        with monkeypatch.context() as only:
            only.setattr(SEARCH, "MAX_STATES", 2)
            first, _ = search(program, CostModel())
        missed += not first.optimal and first.cost > optimum(program, CostModel()) * (1 + 1e-6)
    assert missed


def test_too_much_work_is_not_called_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SEARCH, "BEAM_WIDTH", 2)
    monkeypatch.setattr(SEARCH, "MAX_WORK", 0)
    solutions = [search(random_graph(seed), CostModel())[0] for seed in range(10)]
    assert not all(solution.optimal for solution in solutions)


# -- that the comparison can fail ----------------------------------------------------------------------------------


def _one_state(self: Any, frontier: Any, states: Any, remaining_uses: Any, limit: int) -> Any:
    return dict(sorted(states.items(), key=lambda item: item[1][0])[:1]), False


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [(pruning.Pruner, "prune", _one_state), (pruning._Tolls, "dominates", lambda *_: True)],
)
def test_a_weaker_search_is_caught(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, broken: Any) -> None:
    """One that follows a single state, and one for which every cheaper state dominates."""
    monkeypatch.setattr(owner, method, broken)
    caught = 0
    for seed in range(8):
        program = random_graph(seed)
        solution, _ = search(program, CostModel())
        best = optimum(program, CostModel())
        assert solution.cost >= best * (1 - 1e-6), "nothing is cheaper than the optimum"
        caught += solution.cost > best * (1 + 1e-6)
    assert caught


# -- where a search goes wrong easily ------------------------------------------------------------------------------


def test_a_tensor_taken_twice() -> None:
    """The square of a partial value reduces it once."""

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w)
        return F.softmax(y * y, -1)

    program = traced(run, [torch.empty(4, 8)], [torch.empty(8, 8)], 2)
    program.placements = dict.fromkeys(program.parameters, Shard.of(1, Layout.even(8, 2)))
    assert_optimal(program, CostModel())


def test_a_view_of_a_weight_that_must_be_replicated() -> None:
    """Gathering it is not cheaper than replicating the weight."""
    program = traced(lambda x, w: x @ w.t().flip(0, 1), [torch.empty(4, 8)], [torch.empty(8, 8)], 2)
    assert_optimal(program, CostModel())


def test_a_partial_value_that_is_scattered_and_then_gathered() -> None:
    """Two collectives, where one all-reduce is enough."""

    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.matmul(x, a).relu().sum(0)
        return y * F.linear(x, b), F.softmax(y, -1)

    program = traced(run, [torch.empty(16, 64)], [torch.empty(4, 64, 64), torch.empty(64, 64)], 2)
    program.placements = {next(iter(program.parameters)): Shard.of(0, Layout.even(4, 2))}
    assert_optimal(program, CostModel())
