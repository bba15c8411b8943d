"""Patterns of operators: captures, commutation, alternatives, defaults, predicates, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from paraxis.graph.match import ANY, FALSY, NODE, AnyOf, Arg, Capture, Op, Via, Where, match, matches

aten = torch.ops.aten
X, Y = Capture("x"), Capture("y")


class Nodes:
    """A graph to build arguments in."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.a, self.b = self.graph.placeholder("a"), self.graph.placeholder("b")

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of an operator."""
        return self.graph.call_function(target, args, kwargs)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_captures_are_the_arguments(nodes: Nodes) -> None:
    node = nodes(aten.sub.Tensor, nodes.a, 3)
    assert match(Op(aten.sub.Tensor, X, Y), node) == {"x": nodes.a, "y": 3}


def test_other_operators_and_things_that_are_no_calls_do_not_match(nodes: Nodes) -> None:
    pattern = Op(aten.sub.Tensor, X, Y)
    assert match(pattern, nodes(aten.add.Tensor, nodes.a, 3)) is None
    assert match(pattern, nodes.a) is None and match(pattern, 3) is None
    assert match(Op((aten.sub.Tensor, aten.add.Tensor), X, Y), nodes(aten.add.Tensor, nodes.a, 3)) is not None


def test_same_name_is_the_same_node(nodes: Nodes) -> None:
    square = Op(aten.mul.Tensor, X, X)
    assert match(square, nodes(aten.mul.Tensor, nodes.a, nodes.a)) == {"x": nodes.a}
    assert match(square, nodes(aten.mul.Tensor, nodes.a, nodes.b)) is None
    assert match(square, nodes(aten.mul.Tensor, 1000.5, 500.25 * 2)) == {"x": 1000.5}, "constants are compared by value"


def test_names_can_be_fixed_beforehand(nodes: Nodes) -> None:
    node = nodes(aten.sub.Tensor, nodes.a, nodes.b)
    assert match(Op(aten.sub.Tensor, X, Y), node, {"y": nodes.b}) == {"x": nodes.a, "y": nodes.b}
    assert match(Op(aten.sub.Tensor, X, Y), node, {"y": nodes.a}) is None


def test_commutative_operators_match_in_both_orders(nodes: Nodes) -> None:
    pattern = Op(aten.mul.Tensor, Op(aten.neg.default, X), Y, commutes=True)
    negative = nodes(aten.neg.default, nodes.a)
    for args in ((negative, nodes.b), (nodes.b, negative)):
        assert match(pattern, nodes(aten.mul.Tensor, *args)) == {"x": nodes.a, "y": nodes.b}
    assert match(Op(aten.mul.Tensor, Op(aten.neg.default, X), Y), nodes(aten.mul.Tensor, nodes.b, negative)) is None


def test_matching_backtracks(nodes: Nodes) -> None:
    """The first order of the inner product gives an ``x`` with which the sum does not match."""
    pattern = Op(aten.add.Tensor, Op(aten.mul.Tensor, X, Y, commutes=True), X)
    product = nodes(aten.mul.Tensor, nodes.a, nodes.b)
    assert match(pattern, nodes(aten.add.Tensor, product, nodes.b)) == {"x": nodes.b, "y": nodes.a}


def test_all_ways_to_match_come_in_order(nodes: Nodes) -> None:
    pattern = Op(aten.mul.Tensor, X, Y, commutes=True)
    found = list(matches(pattern, nodes(aten.mul.Tensor, nodes.a, nodes.b)))
    assert found == [{"x": nodes.a, "y": nodes.b}, {"x": nodes.b, "y": nodes.a}]


def test_alternatives(nodes: Nodes) -> None:
    pattern = AnyOf(Op(aten.neg.default, X), Op(aten.sub.Tensor, 0, X))
    for node in (nodes(aten.neg.default, nodes.a), nodes(aten.sub.Tensor, 0, nodes.a)):
        assert match(pattern, node) == {"x": nodes.a}
    assert match(pattern, nodes(aten.sub.Tensor, 1, nodes.a)) is None


def test_too_few_or_too_many_arguments_do_not_match(nodes: Nodes) -> None:
    node = nodes(aten.mean.dim, nodes.a, [-1], True)
    assert match(Op(aten.mean.dim, X, [-1], True), node) is not None
    assert match(Op(aten.mean.dim, X, [-1]), node) is None
    assert match(Op(aten.mean.dim, X, [-1], True, ANY), node) is None


def test_keywords_that_a_pattern_does_not_name_do_not_match(nodes: Nodes) -> None:
    node = nodes(aten.add.Tensor, nodes.a, nodes.b, alpha=2)
    assert match(Op(aten.add.Tensor, X, Y), node) is None
    assert match(Op(aten.add.Tensor, X, Y, ignore=("alpha",)), node) is not None


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        ((1,), {}, 1),
        ((), {"dim": 1}, 1),
        ((), {}, 0),
        ((2,), {}, None),
        ((), {"dim": 2}, None),
    ],
)
def test_argument_may_be_left_out_or_named(nodes: Nodes, args: Any, kwargs: Any, found: int | None) -> None:
    pattern = Op(aten.cat.default, [X, Y], Arg("dim", Capture("dim", AnyOf(0, 1)), 0))
    captures = match(pattern, nodes(aten.cat.default, [nodes.a, nodes.b], *args, **kwargs))
    assert (captures or {}).get("dim") == found


def test_argument_without_a_keyword_cannot_be_named(nodes: Nodes) -> None:
    pattern = Op(aten.cat.default, [X, Y], Arg(None, ANY, 0))
    assert match(pattern, nodes(aten.cat.default, [nodes.a, nodes.b])) is not None
    assert match(pattern, nodes(aten.cat.default, [nodes.a, nodes.b], 1)) is not None
    assert match(pattern, nodes(aten.cat.default, [nodes.a, nodes.b], dim=1)) is None


def test_lists_match_element_by_element(nodes: Nodes) -> None:
    node = nodes(aten.index_put.default, nodes.a, [None, nodes.b], nodes.b)
    assert match(Op(aten.index_put.default, X, [None, Y], Y), node) == {"x": nodes.a, "y": nodes.b}
    assert match(Op(aten.index_put.default, X, [None, None, Y], Y), node) is None
    assert match(Op(aten.index_put.default, X, [0, Y], Y), node) is None


def test_predicates(nodes: Nodes) -> None:
    node = nodes(aten.add.Tensor, nodes.a, 1e-6)
    number = Where(lambda value: isinstance(value, float))
    assert match(Op(aten.add.Tensor, NODE, Capture("eps", number)), node) == {"eps": 1e-6}
    assert match(Op(aten.add.Tensor, number, NODE), node) is None
    assert match(Where(lambda node: len(node.args) == 2, Op(aten.add.Tensor, X, 1e-6)), node) == {"x": nodes.a}
    assert match(Where(lambda node: len(node.args) == 3, Op(aten.add.Tensor, X, 1e-6)), node) is None


@pytest.mark.parametrize(("value", "off"), [(0.0, True), (None, True), (False, True), (0.1, False), (True, False)])
def test_falsy_values_are_options_that_are_off(value: Any, off: bool) -> None:
    assert (match(FALSY, value) is not None) == off


def test_number_of_users(nodes: Nodes) -> None:
    inner = nodes(aten.silu.default, nodes.a)
    product = nodes(aten.mul.Tensor, inner, nodes.b)
    pattern = Op(aten.mul.Tensor, Op(aten.silu.default, X, users=1), Y)
    assert match(pattern, product) is not None
    nodes(aten.neg.default, inner)
    assert match(pattern, product) is None


def test_value_that_leads_to_another(nodes: Nodes) -> None:
    def without_negation(node: Any) -> Any:
        return node.args[0] if isinstance(node, Node) and node.target is aten.neg.default else node

    negative = nodes(aten.neg.default, nodes.a)
    pattern = Op(aten.mul.Tensor, Capture("factor", Via(without_negation, X)), X)
    assert match(pattern, nodes(aten.mul.Tensor, negative, nodes.a)) == {"factor": negative, "x": nodes.a}
    assert match(pattern, nodes(aten.mul.Tensor, nodes.a, nodes.a)) == {"factor": nodes.a, "x": nodes.a}
    assert match(pattern, nodes(aten.mul.Tensor, negative, nodes.b)) is None
