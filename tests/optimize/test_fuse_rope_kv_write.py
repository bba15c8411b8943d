"""RoPE and the writes into an empty static KV cache become one operator, unless memory changes in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, targets, trace

from paraxis.optimize.fuse_rope_kv_write import fuse_rope_kv_write, merge_cache_counters
from paraxis.optimize.prefill import drop_causal_masks

aten = torch.ops.aten
ROWS, LENGTH, FEATURES = 6, 10, 16


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary embedding as models write it."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    counter: torch.Tensor,
    fill: float = 0.0,
    rotate: Callable[..., torch.Tensor] = rope,
) -> tuple[torch.Tensor, ...]:
    """Attention of a layer on an empty static cache, which increments a copy of its counter."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    count = counter.clone()
    at = torch.arange(key.shape[2]) + count
    count.add_(key.shape[2])
    caches = [
        aten.index_put(torch.full((*x.shape[:2], LENGTH, x.shape[3]), fill, dtype=x.dtype), [None, None, at], x)
        for x in (key, value)
    ]
    groups = query.shape[1] // key.shape[1]
    keys, values = (x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(x.shape[0], -1, *x.shape[2:]) for x in caches)
    mask = torch.arange(LENGTH)[None, None, None, :] <= torch.arange(key.shape[2])[None, None, :, None]
    return F.scaled_dot_product_attention(query, keys, values, mask), *caches, count


def draw(batch: int = 1, rows: int = ROWS, features: int = FEATURES) -> list[torch.Tensor]:
    """Query, key, value, cosines, sines and a counter."""
    torch.manual_seed(0)
    states = [torch.randn(batch, rows, heads, features).transpose(1, 2) for heads in (4, 2, 2)]
    return [*states, torch.rand(batch, rows, features), torch.rand(batch, rows, features), torch.tensor(0)]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mask_dropped", [False, True])
def test_rope_and_writes_become_one_operator(mask_dropped: bool, batch: int) -> None:
    inputs = draw(batch)
    module = trace(layer, inputs)
    if mask_dropped:
        assert drop_causal_masks(module) == 1
    assert fuse_rope_kv_write(module) == 1
    left = set(targets(module))
    assert torch.ops.paraxis.rope_kv_write.default in left
    assert not left & {aten.index_put.default, aten.full.default, aten.cat.default, aten.neg.default}
    assert_same_results(module, layer, inputs)


def test_counters_of_several_layers_are_incremented_together() -> None:
    def model(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = layer(*inputs[:6])
        return *first, *layer(first[0], *inputs[1:5], inputs[6])

    inputs = [*draw(), torch.tensor(0)]
    module = trace(model, inputs)
    assert fuse_rope_kv_write(module) == 2
    assert merge_cache_counters(module) == 2
    assert targets(module).count(aten._foreach_add.Scalar) == 1
    assert not {aten.add_.Tensor, aten.clone.default} & set(targets(module))
    assert_same_results(module, model, inputs)


def test_counter_that_is_read_before_and_after_is_merged() -> None:
    def model(x: torch.Tensor, counter: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = counter.clone()
        before = x + count
        after = count.add_(3)
        return before, x + count, count, after

    inputs = [torch.rand(4), torch.tensor(0)]
    module = trace(model, inputs)
    assert merge_cache_counters(module) == 1
    assert_same_results(module, model, inputs)


def test_counter_that_is_an_input_is_not_merged() -> None:
    module = trace(lambda x, counter: x + counter.add_(3), [torch.rand(4), torch.tensor(0)])
    assert merge_cache_counters(module) == 0


def test_counter_with_a_view_is_not_merged() -> None:
    def model(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        count = counter.clone()
        view = count[None]
        count.add_(3)
        return x + view

    inputs = [torch.rand(4), torch.tensor(0)]
    module = trace(model, inputs)
    assert merge_cache_counters(module) == 0
    assert_same_results(module, model, inputs)


def no_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x


def partial_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat([rope(x[..., :8], cos[..., :8], sin[..., :8]), x[..., 8:]], -1)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {"fill": 1.0}),
        ({}, {"rotate": no_rope}),
        ({}, {"rotate": partial_rope}),
        ({"features": 24}, {}),
        ({"rows": 1}, {}),
    ],
    ids=["cache that is not empty", "no RoPE", "partial RoPE", "features that the kernel does not take", "one token"],
)
def test_other_layers_are_not_fused(shape: dict[str, int], options: dict[str, Any]) -> None:
    def model(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return layer(*inputs, **options)

    inputs = draw(**shape)
    module = trace(model, inputs)
    assert fuse_rope_kv_write(module) == 0
    assert_same_results(module, model, inputs)


# -- memory that changes in between --------------------------------------------------------------------------------


def attend(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, count: Any, zeros: Any = None, change: Any = None
) -> tuple[torch.Tensor, ...]:
    """A layer without a mask; ``change`` runs between RoPE and the writes."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    query, key = rope(q, cos, sin), rope(k, cos, sin)
    if change is not None:
        change()
    at = torch.arange(ROWS) + count
    empty = [torch.zeros(x.shape[0], 2, LENGTH, FEATURES) if zeros is None else zeros for x in (key, v)]
    caches = [aten.index_put(e, [None, None, at], x) for e, x in zip(empty, (key, v), strict=True)]
    groups = query.shape[1] // 2
    keys, values = (x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(x.shape[0], -1, *x.shape[2:]) for x in caches)
    return F.scaled_dot_product_attention(query, keys, values), *caches


def counter_incremented_first(q: Any, k: Any, v: Any, cos: Any, sin: Any, counter: Any) -> tuple[torch.Tensor, ...]:
    """One counter for all layers, incremented before they run and read again."""
    at = torch.arange(ROWS) + counter
    counter.add_(ROWS)
    v = v * 1
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    query, key = rope(q, cos, sin), rope(k, cos, sin)
    caches = [aten.index_put(torch.zeros(1, 2, LENGTH, FEATURES), [None, None, at], x) for x in (key, v)]
    keys, values = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, LENGTH, FEATURES) for x in caches)
    return F.scaled_dot_product_attention(query, keys, values), *caches, counter + 0


def counter_incremented_through_a_view(*inputs: Any) -> tuple[torch.Tensor, ...]:
    count = inputs[5].clone()
    count.view(1).add_(2)
    return attend(*inputs[:5], count)


def value_written_in_between(q: Any, k: Any, v: Any, cos: Any, sin: Any, counter: Any) -> tuple[torch.Tensor, ...]:
    base = v * 1
    return attend(q, k, base.view(v.shape), cos, sin, counter.clone(), change=lambda: base[:, :, 0].mul_(3))


def cosines_written(q: Any, k: Any, v: Any, cos: Any, sin: Any, counter: Any) -> tuple[torch.Tensor, ...]:
    cos = cos * 1
    cos[:, 0].mul_(3)
    return attend(q, k, v, cos, sin, counter.clone())


def zeros_written(*inputs: Any) -> tuple[torch.Tensor, ...]:
    zeros = torch.zeros(1, 2, LENGTH, FEATURES)
    zeros[:, :, -1].add_(1)
    return attend(*inputs[:5], inputs[5].clone(), zeros=zeros)


def fewer_queries_than_keys(q: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return attend(q[:, :, :1], *inputs[:4], inputs[4].clone())


def cosines_broadcast_over_the_batch(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, count: Any
) -> tuple[torch.Tensor, ...]:
    return attend(q, k, v, cos[:1], sin, count.clone())


@pytest.mark.parametrize(
    "model",
    [
        counter_incremented_first,
        counter_incremented_through_a_view,
        value_written_in_between,
        cosines_written,
        zeros_written,
        fewer_queries_than_keys,
        cosines_broadcast_over_the_batch,
    ],
)
def test_memory_that_changes_in_between_is_not_fused(model: Any) -> None:
    inputs = draw(2 if model is cosines_broadcast_over_the_batch else 1)
    module = trace(model, [x.clone() for x in inputs])
    assert fuse_rope_kv_write(module) == 0
    merge_cache_counters(module)
    assert_same_results(module, model, inputs)


def test_the_same_layer_without_changes_is_fused() -> None:
    """Otherwise the models above might not be fused for another reason."""

    def model(*inputs: Any) -> tuple[torch.Tensor, ...]:
        return attend(*inputs[:5], inputs[5].clone())

    inputs = draw()
    module = trace(model, inputs)
    assert fuse_rope_kv_write(module) == 1
    assert_same_results(module, model, inputs)
