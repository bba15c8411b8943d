"""Prefill: constant causal masks are dropped, narrow linear layers merged, counters moved to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, call_of, pretend, set_arg, targets, trace
from torch.fx import Graph, GraphModule

from paraxis.compat.torch import FakeTensorMode
from paraxis.optimize.prefill import (
    MAX_MASK_OPERATORS,
    drop_causal_masks,
    is_prefill,
    merge_narrow_linears,
    move_scalars_to_device,
)

aten = torch.ops.aten


def attend_with_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int = 0) -> torch.Tensor:
    """Attention of a prompt on a longer static cache, with a mask over all of the cache."""
    mask = torch.arange(k.shape[2])[None, None, None, :] <= (torch.arange(q.shape[2]) + past)[None, None, :, None]
    return F.scaled_dot_product_attention(q, k, v, mask)


def draw(length: int) -> torch.Tensor:
    """Random states of this length."""
    return torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(length))


def test_constant_causal_mask_is_dropped() -> None:
    inputs = [draw(5), draw(9), draw(9)]
    module = trace(attend_with_mask, inputs)
    assert drop_causal_masks(module) == 1
    (attention,) = module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert attention.args[3:] == (None, 0.0, True)
    assert aten.le.Tensor not in targets(module)
    assert_same_results(module, attend_with_mask, inputs)


@pytest.mark.parametrize("past", [1, 3])
def test_mask_of_a_prompt_after_others_stays(past: int) -> None:
    module = trace(lambda q, k, v: attend_with_mask(q, k, v, past), [draw(5), draw(9), draw(9)])
    assert drop_causal_masks(module) == 0


def test_mask_that_is_an_input_stays() -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    module = trace(F.scaled_dot_product_attention, [draw(5), draw(5), draw(5), mask])
    assert drop_causal_masks(module) == 0


def linears(rows: int, widths: list[int], biased: bool = False) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Linear layers on the same input, with biases on all of them or on none; the graph and its inputs."""

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> list[torch.Tensor]:
        weights, biases = parameters[: len(widths)], parameters[len(widths) :] if biased else [None] * len(widths)
        return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]

    inputs = [torch.randn(1, rows, 16), *(torch.randn(n, 16) for n in widths)]
    inputs += [torch.randn(n) for n in widths] if biased else []
    return trace(run, inputs), inputs


@pytest.mark.parametrize("biased", [False, True])
def test_narrow_linears_on_one_input_are_merged(biased: bool) -> None:
    """Query, key and value of one rank; a wide layer stays separate."""
    module, inputs = linears(600, [64, 16, 2000, 16], biased)
    before = module(*inputs)
    assert merge_narrow_linears(module, inputs) == 1
    assert targets(module).count(aten.linear.default) == 2
    for found, expected in zip(module(*inputs), before, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("rows", "widths"), [(8, [64, 16]), (600, [2000, 16]), (600, [16])])
def test_short_inputs_and_single_narrow_linears_are_not_merged(rows: int, widths: list[int]) -> None:
    module, inputs = linears(rows, widths)
    assert merge_narrow_linears(module, inputs) == 0


@pytest.mark.parametrize(("rows", "expected"), [(8, False), (600, True)])
def test_many_rows_are_a_prefill(rows: int, expected: bool) -> None:
    module, _ = linears(rows, [64, 16])
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        node.meta["val"] = torch.empty(1, rows, 64, device="meta")
    assert is_prefill(module.graph) == expected


def counters(*shapes: tuple[int, ...]) -> tuple[Graph, list[torch.Tensor]]:
    """Inputs on the host that are copied to the device "meta"."""
    mode, graph = FakeTensorMode(), Graph()
    with mode:
        values = [torch.zeros(shape, dtype=torch.int64) for shape in shapes]
    copies = []
    for i, value in enumerate(values):
        node = graph.placeholder(f"counter_{i}")
        node.meta["val"] = value
        copies.append(graph.call_function(aten._to_copy.default, (node,), {"device": torch.device("meta")}))
        with mode:
            copies[-1].meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    graph.output(copies)
    return graph, values


def test_scalars_that_are_only_copied_are_passed_on_the_device() -> None:
    graph, examples = counters((), (3,))
    assert move_scalars_to_device(graph, examples, torch.device("meta")) == [0]
    assert examples[0].device.type == "meta" and examples[1].device.type == "cpu"
    assert [node.target for node in graph.find_nodes(op="call_function", target=aten.clone.default)]
    graph.lint()


# -- every condition, violated alone ---------------------------------------------------------------------------------

SDPA = aten.scaled_dot_product_attention.default


def additive(module: GraphModule) -> None:
    """The same mask as numbers to be added."""
    node = call_of(module, SDPA)
    with module.graph.inserting_before(node):
        set_arg(node, 3, module.graph.call_function(aten._to_copy.default, (node.args[3],), {"dtype": torch.float32}))


def without_the_batch(module: GraphModule) -> None:
    node = call_of(module, SDPA)
    with module.graph.inserting_before(node):
        set_arg(node, 3, module.graph.call_function(aten.select.int, (node.args[3], 0, 0)))


def of_one_row(module: GraphModule) -> None:
    """The mask of the last query, for all of them."""
    node = call_of(module, SDPA)
    with module.graph.inserting_before(node):
        set_arg(node, 3, module.graph.call_function(aten.slice.Tensor, (node.args[3], 2, 4, 5)))


def by_many_operators(module: GraphModule) -> None:
    """Which would all have to run."""
    node = call_of(module, SDPA)
    for _ in range(MAX_MASK_OPERATORS):
        with module.graph.inserting_before(node):
            set_arg(node, 3, module.graph.call_function(aten.clone.default, (node.args[3],)))


def no_mask(module: GraphModule) -> None:
    set_arg(call_of(module, SDPA), 3, None)


def with_dropout(module: GraphModule) -> None:
    set_arg(call_of(module, SDPA), 4, 0.1)


def causal_besides(module: GraphModule) -> None:
    call_of(module, SDPA).kwargs = {"is_causal": True}


def dynamic_length(module: GraphModule) -> None:
    del call_of(module, SDPA).meta["val"]


def one_query(module: GraphModule) -> None:
    pretend(call_of(module, SDPA), (1, 2, 1, 8))


@pytest.mark.parametrize(
    "change",
    [
        additive,
        without_the_batch,
        of_one_row,
        by_many_operators,
        no_mask,
        with_dropout,
        causal_besides,
        dynamic_length,
        one_query,
    ],
)
def test_attention_that_differs_in_one_respect_stays(change: Callable[[GraphModule], None]) -> None:
    module = trace(attend_with_mask, [draw(5), draw(9), draw(9)])
    change(module)
    assert drop_causal_masks(module) == 0


def test_heads_are_repeated_on_a_cpu() -> None:
    """The kernel for causal attention on a GPU takes fewer heads; elsewhere they stay repeated."""

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x[:, :, None].expand(1, 2, 2, 9, 8).reshape(1, 4, 9, 8) for x in (k, v))
        return attend_with_mask(q, k, v)

    inputs = [torch.randn(1, 4, 5, 8), draw(9), draw(9)]
    module = trace(model, inputs)
    assert drop_causal_masks(module) == 1
    assert "enable_gqa" not in call_of(module, SDPA).kwargs and aten.expand.default in targets(module)
    assert_same_results(module, model, inputs)


@pytest.mark.parametrize("kind", ["computed", "not contiguous", "dynamic rows", "of different dtypes"])
def test_other_linears_are_not_merged(kind: str) -> None:
    module, inputs = linears(600, [64, 16])
    first = call_of(module, aten.linear.default)
    if kind == "computed":
        with module.graph.inserting_before(first):
            set_arg(first, 1, module.graph.call_function(aten.neg.default, (first.args[1],)))
    elif kind == "not contiguous":
        inputs[1] = inputs[1].T.contiguous().T
    elif kind == "dynamic rows":
        del first.meta["val"]
    else:
        inputs[1] = inputs[1].double()
    assert merge_narrow_linears(module, inputs) == 0


def used_as_it_is(graph: Graph) -> None:
    graph.output_node().args = ([*graph.output_node().args[0], graph.find_nodes(op="placeholder")[0]],)


def copied_to_another_dtype(graph: Graph) -> None:
    pretend(graph.find_nodes(op="call_function", target=aten._to_copy.default)[0], dtype=torch.int32)


def copied_elsewhere(graph: Graph) -> None:
    copy = graph.find_nodes(op="call_function", target=aten._to_copy.default)[0]
    copy.meta["val"] = torch.zeros((), dtype=torch.int64)


def computed_on_the_host(graph: Graph) -> None:
    graph.find_nodes(op="call_function", target=aten._to_copy.default)[0].target = aten.neg.default


def not_used(graph: Graph) -> None:
    graph.output_node().args = ([],)
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        graph.erase_node(node)


@pytest.mark.parametrize(
    "change", [used_as_it_is, copied_to_another_dtype, copied_elsewhere, computed_on_the_host, not_used]
)
def test_scalars_that_are_not_only_copied_stay_on_the_host(change: Callable[[Graph], None]) -> None:
    graph, examples = counters(())
    change(graph)
    assert move_scalars_to_device(graph, examples, torch.device("meta")) == []


@pytest.mark.parametrize("value", [torch.zeros((), dtype=torch.int32), 3], ids=["int32", "number"])
def test_scalars_of_other_kinds_stay_on_the_host(value: Any) -> None:
    graph, _ = counters(())
    assert move_scalars_to_device(graph, [value], torch.device("meta")) == []
