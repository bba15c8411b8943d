"""Attention of one query on repeated keys and values becomes sums over the KV cache, without copies of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, targets, trace

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
