"""Graphs of any depth: nothing from a captured graph to a solution recurses along it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from paraxis.capture import simplify, to_aten
from paraxis.placement import Shard
from paraxis.solver import CostModel, Program, search

aten = torch.ops.aten


def deep(blocks: int, length: int) -> tuple[GraphModule, dict[Node, str]]:
    """Residual blocks of ``length`` operators, already of ATen operators, and their weights."""
    with FakeTensorMode():
        activation = torch.empty(4, 16)
        values = [torch.empty(16, 16) for _ in range(2 * blocks)]
    graph = Graph()

    def leaf(name: str, value: torch.Tensor) -> Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(target: Any, *args: Node) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = activation
        return node

    x = leaf("x", activation)
    weights = [leaf(f"w{i}", value) for i, value in enumerate(values)]
    for up, down in zip(weights[::2], weights[1::2]):
        y = call(aten.linear.default, x, up)
        for _ in range(length - 3):
            y = call(aten.relu.default, y)
        x = call(aten.add.Tensor, x, call(aten.linear.default, y, down))
    graph.output((x,))
    return GraphModule(nn.Module(), graph), {node: node.name for node in weights}


@contextmanager
def few_frames(count: int) -> Iterator[None]:
    """Limits how much deeper than here calls may nest."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + count)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def assert_solved(graph: GraphModule, weights: dict[Node, str], blocks: int) -> None:
    """Every weight is sharded, with one collective per block."""
    program, model = Program(graph, weights, {}, 2), CostModel()
    solution, _ = search(program, model)
    assert solution.optimal and len(solution.strategies) == len(program.steps) - 1
    assert len(solution.parameters) == 2 * blocks
    assert all(isinstance(p, Shard) and p.layouts for p in solution.parameters.values())
    assert blocks * model.latency <= solution.cost < (blocks + 1) * model.latency


@pytest.mark.long
def test_twenty_thousand_nodes() -> None:
    blocks, length = 500, 40
    assert_solved(simplify(deep(1, length)[0]), {}, 0)  # loads what is imported on first use
    graph, weights = deep(blocks, length)
    assert sum(n.op == "call_function" for n in graph.graph.nodes) == 20_000
    with few_frames(60):
        assert_solved(simplify(graph), weights, blocks)


def test_decomposing_takes_no_frames_per_node() -> None:
    """The tracer has frames of its own; two thousand nodes would not fit."""
    to_aten(deep(1, 10)[0])
    graph, weights = deep(20, 100)
    with few_frames(300):
        made = simplify(to_aten(graph))
        names = {n: weights[n.meta["origin"]] for n in made.graph.nodes if n.meta.get("origin") in weights}
        assert len(names) == 40
        assert_solved(made, names, 20)
