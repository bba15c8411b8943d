"""Solving leaves a placement for every tensor with the captured graph, and refuses parameters that no plan knows."""

from __future__ import annotations

import pytest
import torch
from passes.small import planned
from torch import nn

from paraxis import Config
from paraxis.passes import ParallelAxisSolverPass
from paraxis.passes.solve import solved_of
from paraxis.placement import PARTIAL, REPLICATE, Shard
from paraxis.plan.offline import Planned


def placements(offline: Planned) -> dict[str, object]:
    """By the name of the captured node."""
    marker = ParallelAxisSolverPass.get_stored_field_info
    return {node.name: marker(node, "placement") for node in offline.searched.captured.graph.nodes}


def test_every_computed_tensor_has_a_placement(offline: Planned) -> None:
    found = placements(offline)
    assert found["x"] == found["matmul"] == PARTIAL, "embedding and row layer"
    assert found["layer_norm"] == found["x_1"] == found["cross_entropy"] == REPLICATE
    assert isinstance(found["linear"], Shard) and set(found["linear"].dims) == {2}
    assert isinstance(found["logits"], Shard) and set(found["logits"].dims) == {2}, "logits stay sharded for the loss"


def test_graph_without_a_solution_is_refused() -> None:
    with pytest.raises(RuntimeError, match="run ParallelAxisSolverPass first"):
        solved_of(torch.fx.symbolic_trace(nn.Linear(2, 2)))


def test_constraints_reach_the_search() -> None:
    with planned(constraints={"up": "row"}) as found:
        assert {layer.name: layer.axis for layer in found.plan.layers}["up"] == "row"


def test_one_rank_has_the_plan_of_two_and_no_shards() -> None:
    """So that a model on one rank runs the same program, without collectives."""
    with planned(ranks=1) as found:
        assert [layer.axis for layer in found.plan.layers] == ["vocab", "column", "row", "column", "vocab"]
        assert all(p.local_shape == p.global_shape for p in found.plan.parameters.values())


def test_placed_parameters_keep_their_placement(offline: Planned) -> None:
    """A second solution of the same graph finds the parameters placed, as every later capture does."""
    before = solved_of(offline.searched.captured).solution.parameters
    with torch.no_grad():
        ParallelAxisSolverPass().run(offline.searched.captured, offline.ctx, Config())
    after = solved_of(offline.searched.captured).solution.parameters
    assert [str(p) for p in before.values()] == [str(p) for p in after.values()]


def test_unknown_parameter_is_refused_after_planning(offline: Planned) -> None:
    removed = offline.ctx.param_cache.pop("up.weight")
    try:
        with pytest.raises(RuntimeError, match=r"illegal path for recompilation.*up.weight \(32, 16\)"):
            ParallelAxisSolverPass().run(offline.searched.captured, offline.ctx, Config())
    finally:
        offline.ctx.param_cache["up.weight"] = removed
