"""Masks that are known when a program is compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from paraxis.optimize.prefill import drop_causal_masks, is_prefill, merge_narrow_linears

aten = torch.ops.aten


def on_a_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int = 0) -> torch.Tensor:
    """A prompt on a cache that is longer than it, with the mask that goes over all of it."""
    mask = torch.arange(k.shape[2])[None, None, None, :] <= (torch.arange(q.shape[2]) + past)[None, None, :, None]
    return F.scaled_dot_product_attention(q, k, v, mask)


def draw(length: int) -> torch.Tensor:
    return torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(length))


def test_a_causal_mask_is_opened() -> None:
    q, k, v = draw(5), draw(9), draw(9)
    module = make_fx(lambda q, k, v: on_a_cache(q, k, v), pre_dispatch=True)(q, k, v)
    assert drop_causal_masks(module) == 1
    (attention,) = module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert attention.args[3:] == (None, 0.0, True)
    assert not module.graph.find_nodes(op="call_function", target=aten.le.Tensor)
    torch.testing.assert_close(module(q, k, v), on_a_cache(q, k, v))


@pytest.mark.parametrize("past", [1, 3])
def test_another_mask_stays(past: int) -> None:
    q, k, v = draw(5), draw(9), draw(9)
    module = make_fx(lambda q, k, v: on_a_cache(q, k, v, past), pre_dispatch=True)(q, k, v)
    assert drop_causal_masks(module) == 0


def test_a_mask_that_is_an_input_stays() -> None:
    q, k, v = draw(5), draw(5), draw(5)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    module = make_fx(F.scaled_dot_product_attention, pre_dispatch=True)(q, k, v, mask)
    assert drop_causal_masks(module) == 0


def traced(rows: int, widths: list[int], biased: bool = False) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Layers on the same input, with biases on all of them or on none."""

    def run(x: torch.Tensor, *held: torch.Tensor) -> list[torch.Tensor]:
        weights, biases = held[: len(widths)], held[len(widths) :] if biased else [None] * len(widths)
        return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]

    inputs = [torch.randn(1, rows, 16), *(torch.randn(n, 16) for n in widths)]
    inputs += [torch.randn(n) for n in widths] if biased else []
    return make_fx(run, pre_dispatch=True)(*inputs), inputs


@pytest.mark.parametrize("biased", [False, True])
def test_narrow_products_are_one(biased: bool) -> None:
    """Queries, keys and values of one rank; the wide one stays by itself."""
    module, inputs = traced(600, [64, 16, 2000, 16], biased)
    before = module(*inputs)
    assert merge_narrow_linears(module, inputs) == 1
    assert len(module.graph.find_nodes(op="call_function", target=aten.linear.default)) == 2
    for found, expected in zip(module(*inputs), before, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("rows", "widths"), [(8, [64, 16]), (600, [2000, 16]), (600, [16])])
def test_other_products_stay(rows: int, widths: list[int]) -> None:
    """Few rows, one narrow product alone."""
    module, inputs = traced(rows, widths)
    assert merge_narrow_linears(module, inputs) == 0


@pytest.mark.parametrize(("rows", "long"), [(8, False), (600, True)])
def test_long_prompts(rows: int, long: bool) -> None:
    module, inputs = traced(rows, [64, 16])
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        node.meta["val"] = torch.empty(1, rows, 64, device="meta")
    assert is_prefill(module.graph) == long and len(inputs) == 3
