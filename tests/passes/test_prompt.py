"""Masks that are known when a program is compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from paraxis.passes.prompt import open_causal_masks

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
    assert open_causal_masks(module) == 1
    (attention,) = module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert attention.args[3:] == (None, 0.0, True)
    assert not module.graph.find_nodes(op="call_function", target=aten.le.Tensor)
    torch.testing.assert_close(module(q, k, v), on_a_cache(q, k, v))


@pytest.mark.parametrize("past", [1, 3])
def test_another_mask_stays(past: int) -> None:
    q, k, v = draw(5), draw(9), draw(9)
    module = make_fx(lambda q, k, v: on_a_cache(q, k, v, past), pre_dispatch=True)(q, k, v)
    assert open_causal_masks(module) == 0


def test_a_mask_that_is_an_input_stays() -> None:
    q, k, v = draw(5), draw(5), draw(5)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    module = make_fx(F.scaled_dot_product_attention, pre_dispatch=True)(q, k, v, mask)
    assert open_causal_masks(module) == 0
