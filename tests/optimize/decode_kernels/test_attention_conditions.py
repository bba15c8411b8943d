"""Every condition of the decode attention kernels: layers that differ in one respect, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import call_of, pretend, set_arg, targets, trace
from optimize.decode_kernels.reference import register, rewrite_on_cpu, rope
from torch.fx import GraphModule, Node

from paraxis.optimize.decode_kernels import use_decode_kernels

aten = torch.ops.aten
LENGTH, HEADS, GROUPS = 12, 2, 3


def draw(
    batch: int = 1, features: int = 16, dtype: torch.dtype = torch.float32, queries: int = 1
) -> list[torch.Tensor]:
    """Query, key, value, cosines, sines, both caches, the counter and a mask."""
    torch.manual_seed(0)
    states = [torch.randn(batch, heads, queries, features, dtype=dtype) for heads in (HEADS * GROUPS, HEADS, HEADS)]
    angles = [torch.rand(batch, queries, features, dtype=dtype) for _ in range(2)]
    caches = [torch.randn(batch, HEADS, LENGTH, features, dtype=dtype) for _ in range(2)]
    mask = torch.rand(batch, 1, queries, LENGTH) > 0.3
    return [*states, *angles, *caches, torch.tensor([4]), mask]


def put(cache: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return aten.index_put_(cache, [None, None, at], rows)


def copy(cache: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return cache.index_copy_(2, at, rows)


def repeat(x: torch.Tensor) -> torch.Tensor:
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, GROUPS, length, size).reshape(batch, heads * GROUPS, length, size)


def layer(
    q: Any,
    k: Any,
    v: Any,
    cos: Any,
    sin: Any,
    keys: Any,
    values: Any,
    counter: Any,
    mask: Any = None,
    write: Callable[..., Any] = put,
    rotate: Callable[..., Any] = rope,
    rotate_key: Callable[..., Any] = rope,
    value_position: Callable[..., Any] = lambda at: at,
    **options: Any,
) -> torch.Tensor:
    """Attention of one query on a static cache, as models write it."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    at = torch.arange(q.shape[2]) + counter
    query, key = rotate(q, cos, sin), rotate_key(k, cos, sin)
    keys, values = write(keys, at, key), write(values, value_position(at), v)
    return F.scaled_dot_product_attention(query, repeat(keys), repeat(values), mask, **options)


@pytest.mark.parametrize("write", [put, copy])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_writes_and_attention_become_one_kernel(dtype: torch.dtype, batch: int, write: Callable[..., Any]) -> None:
    module, kernels = rewrite_on_cpu(lambda *inputs: layer(*inputs, write=write), draw(batch, dtype=dtype))
    assert kernels == ["rope_decode_attention"]
    left = set(targets(module))
    assert not left & {aten.index_put_.default, aten.index_copy_.default, aten.cat.default, aten.expand.default}
    assert aten.arange.start_step not in left and aten.arange.default not in left, "the counter is the position"


@pytest.mark.parametrize("scale", [None, 0.3])
def test_scale_and_a_missing_mask(scale: float | None) -> None:
    _, kernels = rewrite_on_cpu(lambda *inputs: layer(*inputs[:-1], scale=scale), draw())
    assert kernels == ["rope_decode_attention"]


def test_additive_mask() -> None:
    *inputs, mask = draw()
    _, kernels = rewrite_on_cpu(layer, [*inputs, torch.zeros(mask.shape).masked_fill(~mask, -1e9)])
    assert kernels == ["rope_decode_attention"]


def no_rope(x: Any, cos: Any, sin: Any) -> Any:
    return x


def rope_in_reverse(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return sin * torch.cat([-x[..., half:], x[..., :half]], -1) + cos * x


def rope_of_half_the_features(x: Any, cos: Any, sin: Any) -> Any:
    return torch.cat([rope(x[..., :8], cos[..., :8], sin[..., :8]), x[..., 8:]], -1)


def rope_without_a_sign(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


def rope_of_other_halves(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin


def rope_of_swapped_halves(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., :half], x[..., half:]], -1) * sin


def rope_of_another_tensor(x: Any, cos: Any, sin: Any) -> Any:
    other, half = x + 1, x.shape[-1] // 2
    return x * cos + torch.cat([-other[..., half:], other[..., :half]], -1) * sin


def rope_with_weighted_sum(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.add(x * cos, torch.cat([-x[..., half:], x[..., :half]], -1) * sin, alpha=2)


def rope_by_angles_per_head(x: Any, cos: Any, sin: Any) -> Any:
    return rope(x, cos.expand(-1, x.shape[1], -1, -1), sin)


def test_operands_of_rope_may_be_in_any_order() -> None:
    _, kernels = rewrite_on_cpu(
        lambda *inputs: layer(*inputs, rotate=rope_in_reverse, rotate_key=rope_in_reverse), draw()
    )
    assert kernels == ["rope_decode_attention"]


@pytest.mark.parametrize(
    "rotate",
    [
        no_rope,
        rope_of_half_the_features,
        rope_without_a_sign,
        rope_of_other_halves,
        rope_of_swapped_halves,
        rope_of_another_tensor,
        rope_with_weighted_sum,
        rope_by_angles_per_head,
    ],
)
@pytest.mark.parametrize("which", ["rotate", "rotate_key"])
def test_attention_alone_becomes_a_kernel_where_rope_differs(which: str, rotate: Callable[..., Any]) -> None:
    _, kernels = rewrite_on_cpu(lambda *inputs: layer(*inputs, **{which: rotate}), draw())
    assert kernels == ["decode_attention"]


def key_with_other_angles(q: Any, k: Any, v: Any, cos: Any, sin: Any, *others: Any) -> Any:
    return layer(q, k, v, cos, sin, *others, rotate_key=lambda x, cos, sin: rope(x, sin, cos))


def cache_read_before(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, *others: Any) -> Any:
    before = keys.sum()
    return layer(q, k, v, cos, sin, keys, *others), before


@pytest.mark.parametrize("model", [key_with_other_angles, cache_read_before])
def test_writes_stay_where_the_kernel_must_not_do_them(model: Callable[..., Any]) -> None:
    module, kernels = rewrite_on_cpu(model, draw())
    assert kernels == ["decode_attention"]
    assert targets(module).count(aten.index_put_.default) == 2


def test_write_stays_where_its_result_is_read_elsewhere_too() -> None:
    def model(*inputs: Any) -> Any:
        return layer(*inputs), inputs[6] + 0

    module, kernels = rewrite_on_cpu(model, draw())
    assert kernels == ["rope_decode_attention"]
    assert targets(module).count(aten.index_put_.default) == 1, "that of the values"


def causal(*inputs: Any) -> Any:
    return layer(*inputs[:-1], is_causal=True)


def other_position_of_values(*inputs: Any) -> Any:
    return layer(*inputs, value_position=lambda at: at + 1)


def accumulated(*inputs: Any) -> Any:
    return layer(*inputs, write=lambda cache, at, rows: aten.index_put_(cache, [None, None, at], rows, True))


def not_written_in_place(*inputs: Any) -> Any:
    return layer(*inputs, write=lambda cache, at, rows: aten.index_put(cache, [None, None, at], rows))


def written_by_batch(*inputs: Any) -> Any:
    return layer(*inputs, write=lambda cache, at, rows: aten.index_put_(cache, [at * 0, None, at], rows[:, :, 0]))


def cache_that_is_no_input(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, *others: Any) -> Any:
    return layer(q, k, v, cos, sin, keys * 1, values * 1, *others)


def mask_per_head(*inputs: Any) -> Any:
    return layer(*inputs[:-1], inputs[-1].expand(-1, HEADS * GROUPS, -1, -1))


def mask_of_one_key(*inputs: Any) -> Any:
    return layer(*inputs[:-1], inputs[-1][..., :1])


def repeated_in_another_order(*inputs: Any) -> Any:
    q, k, v, _, _, keys, values, counter, mask = inputs
    at = torch.arange(1) + counter
    keys, values = (put(x, at, rows).repeat(1, GROUPS, 1, 1) for x, rows in ((keys, k), (values, v)))
    return F.scaled_dot_product_attention(q, keys, values, mask)


@pytest.mark.parametrize(
    "model",
    [
        causal,
        other_position_of_values,
        accumulated,
        not_written_in_place,
        written_by_batch,
        cache_that_is_no_input,
        mask_per_head,
        mask_of_one_key,
        repeated_in_another_order,
    ],
)
def test_other_attention_stays(model: Callable[..., Any]) -> None:
    _, kernels = rewrite_on_cpu(model, draw())
    assert kernels == []


@pytest.mark.parametrize(
    "shape",
    [{"features": 24}, {"features": 8}, {"features": 512}, {"dtype": torch.float64}, {"queries": 2}],
    ids=str,
)
def test_shapes_and_dtypes_that_the_kernel_does_not_take(shape: dict[str, Any]) -> None:
    _, kernels = rewrite_on_cpu(layer, draw(**shape))
    assert kernels == []


def test_attention_with_dropout_stays() -> None:
    register()
    inputs = draw()
    module = trace(lambda *inputs: layer(*inputs, dropout_p=0.1), [x.clone() for x in inputs])
    assert use_decode_kernels(module, inputs) == 0


@pytest.mark.parametrize("which", [5, 6], ids=["keys", "values"])
def test_caches_whose_features_are_not_contiguous(which: int) -> None:
    inputs = draw()
    inputs[which] = inputs[which].transpose(2, 3).contiguous().transpose(2, 3)
    _, kernels = rewrite_on_cpu(layer, inputs)
    assert kernels == []


def test_caches_of_different_shapes() -> None:
    inputs = draw()
    inputs[2], inputs[6] = inputs[2].repeat(1, 1, 1, 2), inputs[6].repeat(1, 1, 1, 2)
    _, kernels = rewrite_on_cpu(layer, inputs)
    assert kernels == []


def test_position_stays_where_its_counter_changes() -> None:
    """The alias would change too. Here every layer has incremented the counter before the kernel reads it."""

    def model(*inputs: Any) -> Any:
        result = layer(*inputs)
        inputs[7].mul_(2)
        return result, inputs[7] + 1

    module, kernels = rewrite_on_cpu(model, draw())
    assert kernels == ["rope_decode_attention"] and aten.add.Tensor in targets(module)


# -- conditions on shapes and dtypes, and on how nodes are written, violated alone -------------------------------------

SDPA = aten.scaled_dot_product_attention.default


def kernels_after(change: Callable[[GraphModule, list[Any]], Any], write: Callable[..., Any] = put) -> int:
    """How many kernels there are in a layer that is changed: its graph, or the examples of its inputs."""
    register()
    inputs = draw(2)
    module = trace(lambda *inputs: layer(*inputs, write=write), [x.clone() for x in inputs])
    examples: list[Any] = list(inputs)
    change(module, examples)
    module.graph.lint()
    return use_decode_kernels(module, examples)


def write_of_keys(module: GraphModule) -> Node:
    return module.graph.find_nodes(op="call_function", target=aten.index_put_.default)[0]


def position(module: GraphModule) -> Node:
    return write_of_keys(module).args[1][2]  # type: ignore[index,return-value]


def example(index: int, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[GraphModule, list[Any]], None]:
    """Another shape or dtype of an input."""

    def change(module: GraphModule, examples: list[Any]) -> None:
        examples[index] = torch.empty(shape, dtype=dtype)

    return change


CHANGES: dict[str, Callable[[GraphModule, list[Any]], Any]] = {
    "position of two elements": lambda m, _: pretend(position(m), (2,)),
    "position in int32": lambda m, _: pretend(position(m), dtype=torch.int32),
    "position without a shape": lambda m, _: position(m).meta.clear(),
    "keys in bfloat16": example(5, 2, HEADS, LENGTH, 16, dtype=torch.bfloat16),
    "values in bfloat16": example(6, 2, HEADS, LENGTH, 16, dtype=torch.bfloat16),
    "query in bfloat16": lambda m, _: pretend(call_of(m, SDPA).args[0], dtype=torch.bfloat16),  # type: ignore[arg-type]
    "keys of three dims": example(5, HEADS, LENGTH, 16),
    "longer keys": example(5, 2, HEADS, LENGTH + 1, 16),
    "keys that are no tensor": lambda _, examples: examples.__setitem__(5, 3),
    "mask of three dims": example(8, 1, 1, LENGTH, dtype=torch.bool),
    "mask of two rows": example(8, 2, 1, 2, LENGTH, dtype=torch.bool),
    "mask of another batch": example(8, 3, 1, 1, LENGTH, dtype=torch.bool),
    "mask of integers": example(8, 2, 1, 1, LENGTH, dtype=torch.int64),
    "mask in float64": example(8, 2, 1, 1, LENGTH, dtype=torch.float64),
    "mask without a shape": lambda _, examples: examples.__setitem__(8, 3),
    "index of four": lambda m, _: set_arg(write_of_keys(m), 1, [None, None, None, position(m)]),
    "index of the heads": lambda m, _: set_arg(write_of_keys(m), 1, [None, position(m), position(m)]),
    "value that is a number": lambda m, _: set_arg(write_of_keys(m), 2, 0.0),
    "attention without a shape": lambda m, _: call_of(m, SDPA).meta.clear(),
}


def test_graph_of_the_conditions_below_matches() -> None:
    assert kernels_after(lambda module, examples: None) == 1
    assert kernels_after(lambda module, examples: None, copy) == 1


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_attention_that_differs_in_one_respect_stays(change: Callable[[GraphModule, list[Any]], Any]) -> None:
    assert kernels_after(change) == 0


def test_copy_along_another_dimension_stays() -> None:
    def change(module: GraphModule, examples: list[Any]) -> None:
        set_arg(call_of(module, aten.index_copy_.default), 1, 1)

    assert kernels_after(change, copy) == 0


@pytest.mark.parametrize("which", [5, 6], ids=["keys", "values"])
def test_kernel_does_not_write_a_cache_with_another_reader(which: int) -> None:
    def model(*inputs: Any) -> Any:
        before = inputs[which].sum()
        return layer(*inputs), before

    _, kernels = rewrite_on_cpu(model, draw())
    assert kernels == ["decode_attention"]


def test_second_layer_on_the_same_keys_and_values_reads_what_was_written() -> None:
    """As in models whose later layers attend to the keys of an earlier one: the write stays for the second reader."""

    def model(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, counter: Any, mask: Any) -> Any:
        at = torch.arange(1) + counter
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        keys, values = put(keys, at, rope(k, c, s)), put(values, at, v)
        first = F.scaled_dot_product_attention(rope(q, c, s), repeat(keys), repeat(values), mask)
        return F.scaled_dot_product_attention(rope(first, c, s), repeat(keys), repeat(values), mask)

    module, kernels = rewrite_on_cpu(model, draw())
    assert kernels == ["rope_decode_attention", "decode_attention"]
    assert targets(module).count(aten.index_put_.default) == 2


def test_position_is_the_counter_where_it_is_incremented_at_the_end() -> None:
    def model(*inputs: Any) -> Any:
        result = layer(*inputs)
        inputs[7].add_(1)
        return result

    module, kernels = rewrite_on_cpu(model, draw())
    assert kernels == ["rope_decode_attention"] and aten.add.Tensor not in targets(module)
    assert targets(module)[-1] is aten._foreach_add_.Scalar
