"""RoPE and the writes into an empty static KV cache become one operator, unless memory changes in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, call_of, pretend, set_arg, targets, trace
from torch.fx import GraphModule, Node

from paraxis.distributed.operators import take_shard
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


# -- every condition, violated alone ---------------------------------------------------------------------------------

SDPA = aten.scaled_dot_product_attention.default


def inputs_of(module: GraphModule) -> list[Node]:
    """Query, key, value, cosines, sines and the counter."""
    return module.graph.find_nodes(op="placeholder")


def keys_of(module: GraphModule) -> Node:
    """The write of the keys; that of the values is the next one."""
    return call_of(module, aten.index_put.default)


def values_of(module: GraphModule) -> Node:
    return call_of(module, aten.index_put.default, 1)


def graph(length: int | None = None) -> GraphModule:
    """A layer that is fused, unless it is changed; attention may read the first rows of the caches alone."""

    def model(q: Any, k: Any, v: Any, cos: Any, sin: Any, count: Any) -> tuple[torch.Tensor, ...]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        query, key = rope(q, cos, sin), rope(k, cos, sin)
        at = torch.arange(ROWS) + count
        caches = [aten.index_put(torch.zeros(2, 2, LENGTH, FEATURES), [None, None, at], x) for x in (key, v)]
        keys, values = (x[:, :, None].expand(2, 2, 2, -1, -1).reshape(2, 4, *x.shape[2:]) for x in caches)
        if length is not None:
            keys, values = keys[:, :, 0:length], values[:, :, 0:length]
        return F.scaled_dot_product_attention(query, keys, values), *caches

    return trace(model, draw(2))


@pytest.mark.parametrize("length", [None, ROWS])
def test_graph_of_the_conditions_below_is_fused(length: int | None) -> None:
    assert fuse_rope_kv_write(graph(length)) == 1


def other_start_of_values(module: GraphModule) -> None:
    """A position of its own, which has the same value."""
    with module.graph.inserting_before(inputs_of(module)[0]):
        other = module.graph.placeholder("other")
    other.meta = dict(inputs_of(module)[-1].meta)
    at = positions(module)
    with module.graph.inserting_after(at):
        own = module.graph.call_function(aten.add.Tensor, (at.args[0], other))
    own.meta = dict(at.meta)
    set_arg(values_of(module), 1, [None, None, own])


def positions(module: GraphModule) -> Node:
    return keys_of(module).args[1][2]  # type: ignore[index,return-value]


def longer_range(module: GraphModule) -> None:
    numbers: Any = positions(module).args[0]
    numbers.args = tuple(ROWS + 1 if arg == ROWS else arg for arg in numbers.args)


def other_user_of_the_zeros(module: GraphModule) -> None:
    zeros = call_of(module, aten.zeros.default)
    with module.graph.inserting_after(zeros):
        module.graph.call_function(aten.neg.default, (zeros,))


def query_that_is_used_before_the_values(module: GraphModule) -> None:
    """The kernel needs the values, and would come too late."""
    query = call_of(module, SDPA).args[0]
    with module.graph.inserting_after(query):
        early = module.graph.call_function(aten.neg.default, (query,))
    value = inputs_of(module)[2]
    with module.graph.inserting_after(early):
        late = module.graph.call_function(aten.mul.Tensor, (value, 1))
    late.meta = dict(value.meta)
    set_arg(values_of(module), 2, late)


CHANGES: dict[str, Callable[[GraphModule], Any]] = {
    "keys that are not written": lambda m: set_arg(call_of(m, SDPA), 1, inputs_of(m)[1]),
    "values that are not written": lambda m: set_arg(call_of(m, SDPA), 2, inputs_of(m)[2]),
    "values at another position": other_start_of_values,
    "other user of the zeros": other_user_of_the_zeros,
    "accumulated": lambda m: setattr(keys_of(m), "args", (*keys_of(m).args, True)),
    "index of the batch": lambda m: set_arg(keys_of(m), 1, [positions(m), None, positions(m)]),
    "index of the heads": lambda m: set_arg(keys_of(m), 1, [None, positions(m), positions(m)]),
    "index of another dim": lambda m: set_arg(keys_of(m), 1, [None, None, None, positions(m)]),
    "range of another length": longer_range,
    "weighted start": lambda m: setattr(positions(m), "kwargs", {"alpha": 2}),
    "start of several elements": lambda m: pretend(inputs_of(m)[-1], (2,)),
    "start that is no integer": lambda m: pretend(inputs_of(m)[-1], dtype=torch.float32),
    "start that is computed": lambda m: setattr(positions(m), "args", (positions(m).args[0], positions(m).args[0])),
    "rows of three dims": lambda m: pretend(inputs_of(m)[2], (2, ROWS, FEATURES)),
    "query of three dims": lambda m: pretend(call_of(m, SDPA).args[0], (4, ROWS, FEATURES)),
    "dtype of the query": lambda m: pretend(call_of(m, SDPA).args[0], dtype=torch.bfloat16),
    "dtype of the keys": lambda m: pretend(keys_of(m), dtype=torch.bfloat16),
    "dtype of the values": lambda m: pretend(values_of(m), dtype=torch.bfloat16),
    "dtype of the rows": lambda m: pretend(inputs_of(m)[2], dtype=torch.bfloat16),
    "batch of the query": lambda m: pretend(call_of(m, SDPA).args[0], (1, 4, ROWS, FEATURES)),
    "features of the query": lambda m: pretend(call_of(m, SDPA).args[0], (2, 4, ROWS, 2 * FEATURES)),
    "cache that is too short": lambda m: [pretend(x, (2, 2, ROWS - 1, FEATURES)) for x in (keys_of(m), values_of(m))],
    "length of the values": lambda m: pretend(values_of(m), (2, 2, LENGTH + 1, FEATURES)),
    "heads of the rows": lambda m: pretend(inputs_of(m)[2], (2, 1, ROWS, FEATURES)),
    "heads of the key": lambda m: pretend(inputs_of(m)[1], (2, 4, ROWS, FEATURES)),
    "cache without a shape": lambda m: keys_of(m).meta.clear(),
    "query used before the values": query_that_is_used_before_the_values,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_layer_that_differs_in_one_respect_is_not_fused(change: Callable[[GraphModule], Any]) -> None:
    module = graph()
    change(module)
    module.graph.lint()
    assert fuse_rope_kv_write(module) == 0


@pytest.mark.parametrize(("position", "value"), [(1, 3), (2, 1)], ids=["features", "from the second row on"])
def test_slices_of_something_else_are_not_fused(position: int, value: int) -> None:
    module = graph(ROWS)
    set_arg(call_of(module, SDPA).args[1], position, value)
    assert fuse_rope_kv_write(module) == 0


def test_keys_rotated_by_other_angles_are_not_fused() -> None:
    def model(q: Any, k: Any, v: Any, cos: Any, sin: Any, count: Any) -> tuple[torch.Tensor, ...]:
        return layer(q, k, v, cos, sin, count, rotate=lambda x, c, s: rope(x, *((c, s) if x.shape[1] == 4 else (s, c))))

    inputs = draw()
    module = trace(model, inputs)
    assert fuse_rope_kv_write(module) == 0
    assert_same_results(module, model, inputs)


def test_shards_of_zeros_are_an_empty_cache() -> None:
    """And nothing else is: zeros whose shard another node uses too stay."""
    for users, count in ((1, 1), (2, 0)):
        module = graph()
        zeros = call_of(module, aten.zeros.default)
        with module.graph.inserting_after(zeros):
            shard = module.graph.call_function(take_shard, (zeros, "shard(1: 0-2|2-4 of 4)", False, "0"))
        shard.meta = dict(zeros.meta)
        set_arg(keys_of(module), 0, shard)
        if users > 1:
            with module.graph.inserting_after(shard):
                module.graph.call_function(aten.neg.default, (shard,))
        assert fuse_rope_kv_write(module) == count


# -- counters --------------------------------------------------------------------------------------------------------


def incremented_twice(x: Any, counter: Any) -> Any:
    count = counter.clone()
    count.add_(3)
    count.mul_(2)
    return x + count


def counter_that_is_written(x: Any, counter: Any) -> Any:
    count = counter.clone()
    count.add_(3)
    counter.mul_(2)
    return x + count


def incremented_by_a_tensor(x: Any, counter: Any) -> Any:
    count = counter.clone()
    count.add_(x[0].long())
    return x + count


def weighted_increment(x: Any, counter: Any) -> Any:
    count = counter.clone()
    count.add_(3, alpha=2)
    return x + count


@pytest.mark.parametrize(
    "model", [incremented_twice, counter_that_is_written, incremented_by_a_tensor, weighted_increment]
)
def test_other_counters_are_not_merged(model: Callable[..., Any]) -> None:
    inputs = [torch.rand(4), torch.tensor(1)]
    module = trace(model, inputs)
    assert merge_cache_counters(module) == 0
    assert_same_results(module, model, inputs)
