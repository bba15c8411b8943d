"""Capturing small functions as graphs, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.graphs import targets
from torch import nn
from torch.fx import GraphModule, Node

from paraxis.capture import capture, mark_output_op, simplify, to_aten


class Model(nn.Module):
    """A module around a function, with a weight for it."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(shape or (4, 4)))

    def forward(self, *args: Any) -> Any:
        return self.function(self.weight, *args)


def captured(model: nn.Module, *args: Any) -> GraphModule:
    """The graph that Dynamo captures."""
    return captured_with_inputs(model, *args)[0]


def captured_with_inputs(model: nn.Module, *args: Any) -> tuple[GraphModule, list[Any]]:
    """The graph that Dynamo captures, and its inputs."""
    graphs: list[tuple[GraphModule, list[Any]]] = []
    capture(model, args, {}, lambda graph, inputs: graphs.append((graph, inputs)))
    torch._dynamo.reset()
    return graphs[0]


def aten_of(function: Callable[..., Any], *args: Any) -> GraphModule:
    """The functionalized ATen graph of a function of a weight and these arguments."""
    return simplify(to_aten(captured(Model(function), *args)))


def names(graph: GraphModule) -> list[str]:
    """The names of the ATen operators of a graph, without the marks on its results."""
    found = [t for t in targets(graph) if isinstance(t, torch._ops.OpOverload) and t is not mark_output_op]
    return [t._schema.name.split("::")[1] for t in found]


def node_of(graph: GraphModule, target: Any) -> Node:
    """The first node that calls an operator."""
    return next(n for n in graph.graph.nodes if n.target is target)
