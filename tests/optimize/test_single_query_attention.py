"""Attention of one query on repeated keys and values becomes sums over the KV cache, without copies of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, call_of, pretend, set_arg, targets, trace
from torch.fx import GraphModule

from paraxis.optimize.single_query_attention import attend_one, decompose_single_query_attention


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of four query heads per key head, as models write it."""

    def repeat(x: torch.Tensor) -> torch.Tensor:
        batch, heads, length, size = x.shape
        return x[:, :, None].expand(batch, heads, 4, length, size).reshape(batch, heads * 4, length, size)

    return F.scaled_dot_product_attention(q, repeat(k), repeat(v), mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_one_query_does_not_copy_the_keys(kind: str) -> None:
    torch.manual_seed(0)
    seen = torch.rand(2, 1, 1, 9) > 0.3
    mask = seen if kind == "bool" else torch.zeros(2, 1, 1, 9).masked_fill(~seen, -1e9)
    inputs = [torch.randn(2, 8, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16), mask]
    module = trace(attention, inputs)
    assert decompose_single_query_attention(module) == 1
    assert attend_one in targets(module) and torch.ops.aten.expand.default not in targets(module)
    assert_same_results(module, attention, inputs)


@pytest.mark.parametrize(("length", "heads"), [(2, 1), (1, 8)], ids=["two queries", "mask per head"])
def test_several_queries_and_masks_per_head_stay(length: int, heads: int) -> None:
    q, k, v = torch.randn(2, 8, length, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    module = trace(attention, [q, k, v, torch.zeros(2, heads, length, 9)])
    assert decompose_single_query_attention(module) == 0


aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default


def with_dropout(module: GraphModule) -> None:
    set_arg(call_of(module, SDPA), 4, 0.1)


def causal(module: GraphModule) -> None:
    call_of(module, SDPA).kwargs = {"is_causal": True}


def dynamic_number_of_queries(module: GraphModule) -> None:
    del call_of(module, SDPA).meta["val"]


def three_dimensions(module: GraphModule) -> None:
    pretend(call_of(module, SDPA), (2, 8, 1))


def values_that_are_not_repeated(module: GraphModule) -> None:
    set_arg(call_of(module, SDPA), 2, module.graph.find_nodes(op="placeholder")[2])


def values_that_are_repeated_by_another_count(module: GraphModule) -> None:
    set_arg(call_of(module, aten.expand.default, 1), 1, [2, 1, 8, 9, 16])
    pretend(module.graph.find_nodes(op="placeholder")[2], (2, 1, 9, 16))


def mask_of_three_dimensions(module: GraphModule) -> None:
    pretend(module.graph.find_nodes(op="placeholder")[3], (1, 1, 9))


def test_graph_of_the_conditions_below_matches() -> None:
    assert decompose_single_query_attention(graph()) == 1


def graph() -> GraphModule:
    """Attention that is decomposed, unless it is changed."""
    states = [torch.randn(2, 8, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)]
    return trace(attention, [*states, torch.zeros(2, 1, 1, 9)])


@pytest.mark.parametrize(
    "change",
    [
        with_dropout,
        causal,
        dynamic_number_of_queries,
        three_dimensions,
        values_that_are_not_repeated,
        values_that_are_repeated_by_another_count,
        mask_of_three_dimensions,
    ],
)
def test_other_attention_is_not_decomposed(change: Callable[[GraphModule], None]) -> None:
    module = graph()
    change(module)
    assert decompose_single_query_attention(module) == 0
