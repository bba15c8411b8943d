"""Decode attention on a preallocated KV cache becomes one operator, with RoPE and the writes if nothing else reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, targets, trace
from optimize.decode_kernels.reference import DEVICE, needs_kernels, register, rope

from paraxis.optimize.decode_kernels import use_decode_kernels

pytestmark = needs_kernels
aten = torch.ops.aten
HEADS, GROUPS, LENGTH, FEATURES = 2, 3, 10, 16


def draw(features: int = FEATURES, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value, cosines, sines, both caches and the position."""
    torch.manual_seed(0)
    states = [torch.randn(1, heads, 1, features, dtype=dtype) for heads in (HEADS * GROUPS, HEADS, HEADS)]
    angles = [torch.rand(1, 1, features, dtype=dtype) for _ in range(2)]
    caches = [torch.randn(1, HEADS, LENGTH, features, dtype=dtype) for _ in range(2)]
    return [x.to(DEVICE) for x in (*states, *angles, *caches, torch.tensor([4]))]


def attend(query: Any, keys: Any, values: Any, position: Any) -> torch.Tensor:
    """Attention on the positions so far, with keys and values repeated for the query heads."""
    keys, values = (
        x[:, :, None].expand(1, HEADS, GROUPS, x.shape[2], x.shape[3]).reshape(1, HEADS * GROUPS, *x.shape[2:])
        for x in (keys, values)
    )
    mask = (torch.arange(LENGTH, device=DEVICE) <= position)[None, None, None, :]
    return F.scaled_dot_product_attention(query, keys, values, mask)


def layer(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, position: Any) -> torch.Tensor:
    """What a model does in a decode step."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    keys = keys.index_copy_(2, position, rope(k, cos, sin))
    values = values.index_copy_(2, position, v)
    return attend(rope(q, cos, sin), keys, values, position)


def rewrite(function: Callable[..., Any], inputs: list[torch.Tensor]) -> tuple[torch.fx.GraphModule, int]:
    """The graph of a function with decode kernels, and their number."""
    register()
    module = trace(function, inputs)
    return module, use_decode_kernels(module, inputs)


def test_rope_writes_and_attention_become_one_operator() -> None:
    inputs = draw()
    module, count = rewrite(layer, inputs)
    assert count == 1
    assert targets(module).count(torch.ops.paraxis.rope_decode_attention.default) == 1
    assert not set(targets(module)) & {aten.index_copy_.default, aten.cat.default, aten.expand.default}
    assert_same_results(module, layer, inputs)


def without_rope(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, position: Any) -> torch.Tensor:
    return attend(q, keys.index_copy_(2, position, k), values.index_copy_(2, position, v), position)


def test_attention_without_rope_uses_the_kernel_without_writes() -> None:
    inputs = draw()
    module, count = rewrite(without_rope, inputs)
    assert count == 1 and torch.ops.paraxis.decode_attention.default in targets(module)
    assert targets(module).count(aten.index_copy_.default) == 2
    assert_same_results(module, without_rope, inputs)


def read_again(*inputs: Any) -> tuple[torch.Tensor, ...]:
    return layer(*inputs), inputs[5].sum()


def test_cache_that_is_read_after_its_write_keeps_the_write() -> None:
    """As in models whose later layers attend to the keys of an earlier one. The kernel then writes the same again."""
    inputs = draw()
    module, count = rewrite(read_again, inputs)
    assert count == 1 and torch.ops.paraxis.rope_decode_attention.default in targets(module)
    assert targets(module).count(aten.index_copy_.default) == 1
    assert_same_results(module, read_again, inputs)


def with_dropout(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, position: Any) -> torch.Tensor:
    keys, values = keys.index_copy_(2, position, k), values.index_copy_(2, position, v)
    return F.scaled_dot_product_attention(q[:, :HEADS], keys, values, dropout_p=0.5)


def two_queries(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, position: Any) -> torch.Tensor:
    keys, values = keys.index_copy_(2, position, k), values.index_copy_(2, position, v)
    return F.scaled_dot_product_attention(torch.cat([q, q], 2)[:, :HEADS], keys, values)


@pytest.mark.parametrize(
    ("function", "options"),
    [(with_dropout, {}), (two_queries, {}), (layer, {"features": 24}), (layer, {"dtype": torch.float64})],
    ids=["dropout", "two queries", "features that are no power of two", "dtype that the kernels do not take"],
)
def test_other_attention_stays(function: Callable[..., Any], options: dict[str, Any]) -> None:
    module, count = rewrite(function, draw(**options))
    assert count == 0 and aten.scaled_dot_product_attention.default in targets(module)
