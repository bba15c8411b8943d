"""Patterns of operators: captures, constants, lists, options, either order, and backtracking."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from paraxis.graph.match import ANY, FALSY, NODE, AnyOf, Arg, Capture, Op, Via, Where, match, matches

aten = torch.ops.aten
MUL, ADD = aten.mul.Tensor, aten.add.Tensor


def inputs() -> tuple[Graph, Node, Node]:
    graph = Graph()
    return graph, graph.placeholder("x"), graph.placeholder("y")


def test_captures_name_nodes_and_constants() -> None:
    graph, x, _ = inputs()
    node = graph.call_function(MUL, (x, 0.5))
    assert match(Op(MUL, Capture("a"), Capture("b")), node) == {"a": x, "b": 0.5}
    assert match(Op(MUL, Capture("a"), 0.5), node) == {"a": x}
    assert match(Op(MUL, Capture("a"), 2.0), node) is None and match(Op(ADD, ANY, ANY), node) is None
    assert match(Op((ADD, MUL), ANY, ANY), node) == {}


def test_same_name_is_the_same_value() -> None:
    graph, x, y = inputs()
    square, product = graph.call_function(MUL, (x, x)), graph.call_function(MUL, (x, y))
    pattern = Op(MUL, Capture("a"), Capture("a"))
    assert match(pattern, square) == {"a": x} and match(pattern, product) is None
    assert match(Op(MUL, Capture("a"), ANY), product, {"a": y}) is None
    assert match(Op(MUL, Capture("a"), ANY, commutes=True), product, {"a": y}) == {"a": y}


def test_either_order_is_tried_and_backtracks() -> None:
    """The first order captures a name that the rest of the pattern then contradicts."""
    graph, x, y = inputs()
    total = graph.call_function(ADD, (graph.call_function(MUL, (x, y)), y))
    product = Op(MUL, Capture("b"), Capture("a"), commutes=True)
    assert match(Op(ADD, product, Capture("b")), total) == {"a": x, "b": y}
    found = list(matches(Op(MUL, Capture("a"), Capture("b"), commutes=True), total.args[0]))
    assert found == [{"a": x, "b": y}, {"a": y, "b": x}]


def test_options_by_position_by_name_and_left_out() -> None:
    graph, x, _ = inputs()
    pattern = Op(aten.sum.dim_IntList, Capture("x"), [-1], Arg("keepdim", Capture("keepdim"), False))
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = [
        ((x, [-1]), {}, False),
        ((x, [-1], True), {}, True),
        ((x, [-1]), {"keepdim": True}, True),
    ]
    for args, kwargs, keepdim in calls:
        found = match(pattern, graph.call_function(aten.sum.dim_IntList, args, kwargs))
        assert found == {"x": x, "keepdim": keepdim}
    other = graph.call_function(aten.sum.dim_IntList, (x, [-1]), {"dtype": torch.float64})
    assert match(pattern, other) is None, "an option that the pattern does not know"
    ignoring = Op(aten.sum.dim_IntList, ANY, [-1], ignore=("dtype",))
    assert match(ignoring, other) == {}
    assert match(ignoring, graph.call_function(aten.sum.dim_IntList, (x, [-1, 0]))) is None, "a longer list"


def test_users_alternatives_and_steps() -> None:
    graph, x, y = inputs()
    product = graph.call_function(MUL, (x, y))
    assert match(Op(MUL, ANY, ANY, users=1), product) is None
    negative = graph.call_function(aten.neg.default, (product,))
    assert match(Op(MUL, ANY, ANY, users=1), product) == {}
    assert match(AnyOf(Op(ADD, ANY, ANY), Capture("other", NODE)), negative) == {"other": negative}
    through = Via(lambda node: node.args[0] if node.target is aten.neg.default else node, Capture("inner"))
    assert match(through, negative) == {"inner": product} and match(through, product) == {"inner": product}
    assert match(Where(lambda value: value > 3), 4) == {} and match(Where(lambda value: value > 3), 2) is None
    assert match(FALSY, 0) == {} and match(FALSY, None) == {} and match(NODE, 3) is None
