"""Parameters are found among the inputs of a captured graph, by the names of the model."""

from __future__ import annotations

import torch
from torch import nn

from paraxis.passes.parameters import find_parameters, sharded_inputs
from paraxis.placement import REPLICATE
from paraxis.plan.offline import Planned


def test_parameters_have_the_names_of_the_model(offline: Planned) -> None:
    offline.ctx.example_inputs = []
    found = find_parameters(offline.searched.captured, offline.ctx)
    shapes = {p.name: p.shape for p in found}
    assert shapes == {name: p.global_shape for name, p in offline.plan.parameters.items()}
    assert all(p.placement == offline.plan.parameters[p.name].placement for p in found)


def test_attributes_of_a_graph_module_are_parameters_without_placement(offline: Planned) -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.relu, (graph.get_attr("weight"),)))
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(3, 4))
    (found,) = find_parameters(torch.fx.GraphModule(root, graph), offline.ctx)
    assert (found.name, found.shape, found.meta, found.placement) == ("weight", (3, 4), None, None)


def test_parameters_are_not_sharded_inputs(offline: Planned) -> None:
    """Those are KV caches of an earlier call."""
    assert sharded_inputs(offline.searched.captured) == {}
    assert REPLICATE in {p.placement for p in offline.plan.parameters.values()}
