"""Counters of a decode step: one operator increments all, and positions need no kernel of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.graphs import assert_same_results, pretend, targets, trace
from torch.fx import Graph

from paraxis.optimize.decode_kernels.scalars import (
    decompose_outer_products,
    merge_counter_increments,
    simplify_position,
)

aten = torch.ops.aten


def count_on(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Every layer reads its counter, and increments it."""
    x = x + first
    first.add_(1)
    x = x * second
    second.add_(1)
    return x


def test_increments_of_all_counters_become_one_operator() -> None:
    inputs = [torch.ones(3), torch.tensor(4), torch.tensor(7)]
    module = trace(count_on, [x.clone() for x in inputs])
    merge_counter_increments(module.graph)
    module.recompile()
    assert targets(module).count(aten._foreach_add_.Scalar) == 1 and aten.add_.Tensor not in targets(module)
    assert_same_results(module, count_on, inputs)


def read_after(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    first.add_(1)
    return x + first


def of_a_copy(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    copy = first + 0
    copy.add_(1)
    return x


def read_through_an_alias(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    alias = first.to(torch.int64)
    first.add_(1)
    return x + alias


def of_several_elements(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return first + 1


def by_a_tensor(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    first.add_(second)
    return x * 2


@pytest.mark.parametrize("function", [read_after, of_a_copy, read_through_an_alias, of_several_elements, by_a_tensor])
def test_counter_that_is_read_later_or_no_input_stays(function: Any) -> None:
    module = trace(function, [torch.ones(3), torch.tensor(4), torch.tensor(7)])
    merge_counter_increments(module.graph)
    assert aten.add_.Tensor in targets(module) and aten._foreach_add_.Scalar not in targets(module)


@pytest.mark.parametrize(("shapes", "decomposed"), [(((1, 3, 1), (1, 1, 4)), True), (((1, 3, 2), (1, 2, 4)), False)])
def test_matmul_over_one_element_is_elementwise(shapes: Any, decomposed: bool) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    module = trace(torch.matmul, inputs)
    decompose_outer_products(module.graph)
    module.recompile()
    assert (aten.mul.Tensor in targets(module)) == decomposed
    assert_same_results(module, torch.matmul, inputs)


@pytest.mark.parametrize("length", [1, 2])
def test_first_position_is_the_counter(length: int) -> None:
    inputs = [torch.tensor([5])]
    module = trace(lambda count: torch.arange(length) + count, inputs)
    simplify_position(module.graph, module.graph.output_node().all_input_nodes[0])
    module.graph.eliminate_dead_code()
    module.recompile()
    assert (aten.add.Tensor in targets(module)) == (length > 1)
    assert_same_results(module, lambda count: torch.arange(length) + count, inputs)


def test_position_that_is_written_before_the_end_stays() -> None:
    def function(count: torch.Tensor) -> torch.Tensor:
        at = torch.arange(1) + count
        count.add_(1)
        return at * count

    module = trace(function, [torch.tensor([5])])
    (at,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    simplify_position(module.graph, at)
    assert aten.reshape.default not in targets(module)


def test_weighted_increment_stays() -> None:
    module = trace(lambda x, count: x * 1 + 0 * count.add_(1, alpha=2).sum(), [torch.ones(3), torch.tensor(4)])
    (increment,) = module.graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    increment.replace_all_uses_with(increment.args[0])
    merge_counter_increments(module.graph)
    assert aten.add_.Tensor in targets(module)


def aliased(later: bool, dtype: torch.dtype = torch.int64) -> Graph:
    """A counter, ``counter.to(dtype)``, and an increment; the other one is read before it, or later."""
    graph = Graph()
    counter = graph.placeholder("counter")
    alias = graph.call_function(aten.to.dtype, (counter, dtype))
    counter.meta["val"], alias.meta["val"] = torch.tensor(3), torch.tensor(3, dtype=dtype)
    if not later:
        read = graph.call_function(aten.neg.default, (alias,))
    graph.call_function(aten.add_.Tensor, (counter, 1))
    if later:
        read = graph.call_function(aten.neg.default, (alias,))
    graph.output(read)
    return graph


@pytest.mark.parametrize(
    ("later", "dtype", "merged"),
    [(False, torch.int64, True), (True, torch.int64, False), (True, torch.float32, True)],
    ids=["read before", "alias read later", "copy read later"],
)
def test_counter_is_merged_unless_an_alias_is_read_later(later: bool, dtype: torch.dtype, merged: bool) -> None:
    graph = aliased(later, dtype)
    merge_counter_increments(graph)
    assert bool(graph.find_nodes(op="call_function", target=aten._foreach_add_.Scalar)) == merged


def test_matmul_of_different_dtypes_stays() -> None:
    module = trace(torch.matmul, [torch.rand(3, 1), torch.rand(1, 4)])
    pretend(module.graph.find_nodes(op="placeholder")[0], dtype=torch.bfloat16)
    decompose_outer_products(module.graph)
    assert aten.mul.Tensor not in targets(module)


def test_positions_of_several_sequences_stay() -> None:
    module = trace(lambda count: torch.arange(1) + count, [torch.tensor([5, 6])])
    simplify_position(module.graph, module.graph.output_node().all_input_nodes[0])
    assert aten.reshape.default not in targets(module)
