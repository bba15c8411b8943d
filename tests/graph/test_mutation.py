"""Which tensors a node writes to or aliases."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, Node

from paraxis.graph.mutation import IN_PLACE, has_side_effect, is_view, mutated, written_input

aten = torch.ops.aten


@pytest.fixture
def x() -> Node:
    return Graph().placeholder("x")


def test_first_argument_of_an_in_place_operator_is_mutated(x: Node) -> None:
    add_ = x.graph.call_function(aten.add_.Tensor, (x, 1))
    assert mutated(add_) is x and has_side_effect(add_)
    add = x.graph.call_function(aten.add.Tensor, (x, 1))
    assert mutated(add) is None and not has_side_effect(add) and mutated(x) is None


def test_functional_operator_that_replaces_a_write_counts_as_one(x: Node) -> None:
    first = x.graph.call_function(aten.add.Tensor, (x, 1))
    second = x.graph.call_function(aten.mul.Tensor, (first, 2))
    assert written_input(first) is None
    first.meta[IN_PLACE] = second.meta[IN_PLACE] = aten.add_.Tensor
    assert mutated(second) is first and written_input(second) is x and written_input(x) is x


def test_views_share_memory(x: Node) -> None:
    call = x.graph.call_function
    assert is_view(call(aten.view.default, (x, [2]))) and is_view(call(aten.reshape.default, (x, [2])))
    assert is_view(call(operator.getitem, (call(aten.split.Tensor, (x, 1)), 0)))
    assert not is_view(call(aten.add.Tensor, (x, 1))) and not is_view(call(aten.linear.default, (x, x)))
    assert not is_view(call(torch.add, (x, 1))) and not is_view(x)


def test_marked_writes_and_gradient_switches_have_side_effects(x: Node) -> None:
    marked = x.graph.call_function(torch.add, (x, 1))
    assert not has_side_effect(marked)
    marked.meta["writes"] = True
    assert has_side_effect(marked)
    assert has_side_effect(x.graph.call_function(torch._C._set_grad_enabled, (False,)))
