"""The search: known answers, and the optimum by brute force."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from solver.exhaustive import cheapest
from solver.programs import Transformer, compiled_call_of, random_program, traced
from torch.testing._internal.distributed.fake_pg import FakeStore

from paraxis import ParallelExecutionCtx, parallelize_model
from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Shard
from paraxis.plan import Plan
from paraxis.solver import CostModel, Program, search

EVEN = Layout.even(8, 2)


@pytest.fixture
def plan_for() -> Iterator[object]:
    """Plans a transformer for simulated ranks."""

    def plan(world: int, **options: object) -> Plan:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        try:
            ctx = ParallelExecutionCtx(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
            ids = torch.zeros(2, 8, dtype=torch.long)
            parallelize_model(Transformer(**options), ctx, example_inputs=(ids,), show_progress=False)  # type: ignore[arg-type]
            assert ctx.plan is not None
            return ctx.plan
        finally:
            dist.destroy_process_group()
            torch._dynamo.reset()

    yield plan
    if dist.is_initialized():
        dist.destroy_process_group()


COLUMN = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
ROW = ("attention.o", "mlp.down")


def check_axes(plan: Plan) -> None:
    axes = {layer.name: layer.axis for layer in plan.layers}
    assert axes.pop("embed") == "vocab" and axes.pop("head") == "column"
    for name, axis in axes.items():
        _, _, part = name.split(".", 2)
        assert axis == ("row" if part in ROW else "column"), name
        assert part in ROW + COLUMN


@pytest.mark.parametrize("world", [2, 8])
def test_the_known_answer_for_a_transformer(plan_for, world: int) -> None:  # type: ignore[no-untyped-def]
    plan = plan_for(world)
    check_axes(plan)
    assert plan.count() == {"all_reduce": 1 + 2 * 2, "all_gather": 1}  # embedding, two per block; the logits
    assert plan.optimal
    assert all("norm" in name for name, _ in plan.replicated)


def test_parallel_attention_and_mlp_need_one_all_reduce(plan_for) -> None:  # type: ignore[no-untyped-def]
    plan = plan_for(2, layers=3, parallel=True)
    check_axes(plan)
    assert plan.count() == {"all_reduce": 1 + 3, "all_gather": 1}


def test_grouped_heads_on_more_ranks_than_heads(plan_for) -> None:  # type: ignore[no-untyped-def]
    plan = plan_for(8, layers=1, kv_heads=2)
    check_axes(plan)
    assert plan.count() == {"all_reduce": 3, "all_gather": 1}
    assert plan.parameters["layers.0.attention.k.weight"].placement == Shard.of(0, Layout.even(8, 8, unit=4))


def test_copies_of_heads_are_not_summed_twice(plan_for) -> None:  # type: ignore[no-untyped-def]
    """Two heads on four ranks: the contracted dimension of the output projection must not have copies."""
    plan = plan_for(4, layers=1, heads=2, kv_heads=2)
    for layer in plan.layers:
        if layer.axis == "row":
            placement = plan.parameters[f"{layer.name}.weight"].placement
            assert isinstance(placement, Shard) and not placement.has_copies


def test_captured_program_of_a_transformer() -> None:
    """The same answer from the solver alone."""
    program = compiled_call_of(Transformer(layers=1), torch.zeros(2, 8, dtype=torch.long))
    solution, _ = search(program, CostModel(world=2))
    names = {program.parameters[v]: p for v, p in solution.parameters.items()}
    dims = {name: list(p.dims) for name, p in names.items() if isinstance(p, Shard)}
    for part in COLUMN:
        assert next(d for n, d in dims.items() if n.endswith(f"{part.split('.')[1]}.weight")) == [0]
    for part in ROW:
        assert next(d for n, d in dims.items() if n.endswith(f"{part.split('.')[1]}.weight")) == [1]
    sums = [s for s in solution.strategies.values() if s.kind in ("row", "vocab")]
    assert len(sums) == 3


# -- optimality ----------------------------------------------------------------------------------------------------

MODELS = [
    CostModel(),
    CostModel(latency=1e-9, replication=1e-12),
    CostModel(latency=1e-10, bandwidth=1e9, replication=0.0, flops=1e9, memory=1e9),
    CostModel(latency=1e-7, bandwidth=1e8, replication=1e-9, detour=0.0),
]
"""Where latency, memory, bandwidth and compute decide."""


@pytest.mark.parametrize("seed", range(0, 120, 2))
def test_nothing_is_cheaper(seed: int) -> None:
    program = random_program(seed)
    for model in MODELS:
        solution, _ = search(program, model)
        assert solution.optimal
        assert solution.cost == pytest.approx(cheapest(program, model, keep_sharded=True), rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_cheaper_on_four_ranks(seed: int) -> None:
    program = random_program(seed, world=4)
    for model in (CostModel(world=4), CostModel(world=4, latency=1e-10, bandwidth=1e9, replication=0.0, memory=1e9)):
        solution, _ = search(program, model)
        assert solution.cost == pytest.approx(cheapest(program, model, keep_sharded=True), rel=1e-9)


def test_a_solution_is_consistent() -> None:
    """Every step has a strategy, every parameter a placement, and results are never partial."""
    for seed in range(20):
        program = random_program(seed)
        for keep in (True, False):
            solution, _ = search(program, CostModel(), keep_sharded=keep)
            assert set(solution.strategies) == {s for s in program.steps if s.call is not None}
            assert set(solution.parameters) <= set(program.parameters)
            assert PARTIAL not in solution.results
            assert len(solution.results) == len(program.steps[-1].inputs)
            if not keep:
                assert set(solution.results) == {REPLICATE}


# -- semantics -----------------------------------------------------------------------------------------------------


def _two_layers(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.softmax(F.linear(F.relu(F.linear(x, a)), b), -1)  # which needs all features


def _program(function: object = _two_layers, **fixed: object) -> Program:
    program = traced(function, [torch.empty(4, 8)], [torch.empty(8, 8), torch.empty(8, 8)], 2)  # type: ignore[arg-type]
    values = list(program.parameters)
    program.placements = {values[int(k[1:])]: p for k, p in fixed.items()}  # type: ignore[misc]
    return program


def test_column_then_row() -> None:
    program = _program()
    solution, _ = search(program, CostModel())
    first, _, second, _ = (solution.strategies[s] for s in program.steps if s.call is not None)
    assert (first.kind, second.kind) == ("column", "row")
    assert first.inputs[0] == SHARED, "a replicated input of a sharded result has partial gradients"
    assert solution.results == (REPLICATE,)


def test_fixed_placements_do_not_change() -> None:
    program = _program(p0=Shard.of(1, EVEN), p1=Shard.of(1, EVEN))
    solution, _ = search(program, CostModel())
    a, b = program.parameters
    assert solution.parameters == {a: Shard.of(1, EVEN), b: Shard.of(1, EVEN)}
    assert [s.kind for s in solution.strategies.values() if s.kind] == ["row", "row"]


def test_partial_values_are_added_before_the_all_reduce() -> None:
    """``x @ a + y @ b``, both row-parallel: one all-reduce, not two."""

    def both(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.linear(x, a) + F.linear(y, b))

    program = traced(both, [torch.empty(4, 8), torch.empty(4, 8)], [torch.empty(8, 8), torch.empty(8, 8)], 2)
    program.placements = {v: Shard.of(1, EVEN) for v in program.parameters}
    solution, _ = search(program, CostModel())
    steps = [s for s in program.steps if s.call is not None]
    assert [solution.strategies[s].outputs for s in steps] == [(PARTIAL,), (PARTIAL,), (PARTIAL,), (REPLICATE,)]


def test_impure_steps_run_replicated() -> None:
    program = _program()
    relu = next(s for s in program.steps if s.call is not None and "relu" in str(s.call.target))
    relu.node.meta["impure"] = True
    solution, _ = search(program, CostModel())
    assert solution.strategies[relu].inputs == (REPLICATE,) and solution.strategies[relu].outputs == (REPLICATE,)
