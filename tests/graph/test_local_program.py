"""What a local program carries besides its graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph, GraphModule

from paraxis.graph.local_program import INFO, ProgramInfo, draws_random, info_of, region_of


def program() -> GraphModule:
    graph = Graph()
    graph.output(graph.call_function(torch.relu, (graph.placeholder("x"),)))
    return GraphModule({}, graph)


def test_graph_that_was_not_partitioned_is_refused() -> None:
    with pytest.raises(RuntimeError, match="run ParallelLayerReplacePass first"):
        info_of(program())
    module = program()
    module.meta[INFO] = ProgramInfo()
    assert info_of(module) is module.meta[INFO]


def test_program_draws_random_numbers_if_a_node_still_does() -> None:
    module = program()
    assert not draws_random(module)
    module.meta[INFO] = ProgramInfo(random=SimpleNamespace())  # type: ignore[arg-type]
    assert not draws_random(module), "its random operators were removed"
    next(iter(module.graph.nodes)).meta["random"] = torch.ops.aten.dropout.default
    assert draws_random(module)


def test_region_is_that_of_activation_checkpointing() -> None:
    node = Graph().placeholder("x")
    assert region_of(None) is None and region_of(node) is None
    node.target = torch.ops.higher_order.tag_activation_checkpoint
    assert region_of(node) == "x"
