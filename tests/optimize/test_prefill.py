"""Prefill: constant causal masks are dropped, narrow linear layers merged, counters moved to the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, targets, trace
from torch.fx import Graph

from paraxis.compat.torch import FakeTensorMode
from paraxis.optimize.prefill import drop_causal_masks, is_prefill, merge_narrow_linears, move_scalars_to_device

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
