"""Making a plan: rank 0 searches for all ranks, deep models are planned by their first blocks, and errors reach all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import context, parallel
from models.tiny import build
from torch import nn

from paraxis import Config, ParallelExecutionCtx, parallelize_model
from paraxis.plan import make
from paraxis.plan.make import NotOneGraph, Searched, search_plan
from paraxis.plan.offline import simulated_group
from paraxis.weights.build import attach

PLANNED_ON_RANK0 = make._planned_on_rank0


def plan_twice(folder: str) -> tuple[Any, Any, bool]:
    """The plan that rank 0 makes for all ranks, the one that every rank makes, and whether this rank made the first."""
    _, by_rank0 = parallel(folder)
    make._planned_on_rank0 = lambda *_: None  # type: ignore[assignment]
    try:
        _, by_all = parallel(folder)
    finally:
        make._planned_on_rank0 = PLANNED_ON_RANK0
    assert "capture" in by_all.timings
    return by_rank0.plan.to_json(), by_all.plan.to_json(), "capture" in by_rank0.timings


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_rank0_makes_the_plan_that_every_rank_would(ranks: Any, checkpoints: Any, name: str) -> None:
    for rank, (by_rank0, by_all, searched) in enumerate(ranks(2).run(plan_twice, checkpoints(name))):
        assert by_rank0 == by_all and searched == (rank == 0)


def train_a_planned_model() -> tuple[bool, float]:
    """Whether this rank planned a model that is in training, with dropout, and the loss."""
    model = build("gpt2", resid_pdrop=0.1).train()
    ctx = context()
    parallelize_model(model, ctx)
    loss = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    loss.backward()
    return "capture" in ctx.timings, float(loss)


def test_planning_on_rank0_runs_no_collective(ranks: Any) -> None:
    """Dropout would agree on a seed, which the other ranks do not ask for."""
    (first, loss), (second, other) = ranks(2).run(train_a_planned_model, timeout=120)
    assert first and not second and loss == other


def error_of_constraints(folder: str, constraints: dict[str, str] | None) -> tuple[str, str]:
    """The error of this rank; without constraints, those of the ranks differ."""
    constraints = constraints or {"lm_head": ("column", "replicated")[dist.get_rank()]}
    with pytest.raises((ValueError, RuntimeError)) as caught:
        parallel(folder, constraints=constraints)
    return type(caught.value).__name__, str(caught.value)


def test_all_ranks_raise_the_error_of_planning(ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints("llama")
    for kind, message in ranks(2).run(error_of_constraints, folder, {"model.layers.*.nothing": "row"}):
        assert kind == "ConstraintError" and "nothing" in message
    for _, message in ranks(2).run(error_of_constraints, folder, None):
        assert "rank 1" in message


def search(model: nn.Module, examples: Any = None, **options: Any) -> Searched | NotOneGraph:
    """Search the plan of a model over two simulated ranks."""
    try:
        with simulated_group(2) as group:
            ctx = ParallelExecutionCtx(group, torch.device("cpu"))
            ctx.state.simulated = True
            attach(model, ctx)
            found = search_plan(model, ctx, Config(show_progress=False, **options), examples)
            assert not (ctx.state.planning or ctx.state.searching) and ctx.plan is None, "searching applies nothing"
            return found
    finally:
        torch._dynamo.reset()


def test_deep_model_is_planned_by_its_first_blocks() -> None:
    """And so has the plan that capturing all of its blocks gives."""
    blocks, full = (search(build("llama", num_hidden_layers=6), plan_by_blocks=each) for each in (True, False))
    assert isinstance(blocks, Searched) and isinstance(full, Searched)
    assert blocks.repeated and not full.repeated
    assert len(blocks.captured.graph.nodes) < len(full.captured.graph.nodes) / 2
    assert blocks.plan.placements == full.plan.placements and blocks.plan.layers == full.plan.layers
    assert blocks.plan.cost == pytest.approx(full.plan.cost)


def test_constraint_on_one_block_captures_all() -> None:
    found = search(build("llama", num_hidden_layers=6), constraints={"model.layers.3.mlp.down_proj": "column"})
    assert isinstance(found, Searched) and not found.repeated
    axes = {layer.name: layer.axis for layer in found.plan.layers if "down_proj" in layer.name}
    assert [name for name, axis in axes.items() if axis == "column"] == ["model.layers.3.mlp.down_proj"]


class Branch(nn.Module):
    """A graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum().item() > 0 else x


def test_graph_break_is_reported_with_its_line() -> None:
    found = search(Branch(), torch.ones(2, 8))
    assert isinstance(found, NotOneGraph) and "if x.sum().item() > 0" in found.reason
