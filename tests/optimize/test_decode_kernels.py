"""Decode steps become kernels, and what differs in one respect from what a kernel computes does not.

Kernels need a GPU. Here the rewritten program runs on a CPU, with each kernel replaced by the operators that it stands
for, and must give what the program gave before.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, targets, trace
from torch.fx import GraphModule

from paraxis.optimize.decode_kernels import use_decode_kernels
from paraxis.optimize.decode_kernels.linears import MAX_ROW_FEATURES
from paraxis.optimize.decode_kernels.scalars import decompose_outer_products, merge_counter_increments

aten = torch.ops.aten
SCHEMAS = [
    "decode_attention(Tensor q, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor",
    "rope_decode_attention(Tensor q, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(a!) keys,"
    " Tensor(b!) values, Tensor position, Tensor? mask, float scale) -> Tensor",
    "gemv(Tensor x, Tensor[] weights, Tensor[] biases, bool gated) -> Tensor",
    "rmsnorm_gemv(Tensor x, Tensor? residual, Tensor norm, float eps, Tensor[] weights, Tensor[] biases, bool gated)"
    " -> (Tensor, Tensor)",
]
_library = torch.library.Library("paraxis", "FRAGMENT")


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """The operators of the kernels, without implementations where there is no Triton."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    for schema in SCHEMAS:
        if not hasattr(torch.ops.paraxis, schema.split("(")[0]):
            _library.define(schema)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("decode_attention", "gemv"):
            patch.setitem(sys.modules, f"paraxis.kernels.triton.{name}", ModuleType(name))
        yield


# -- what the kernels compute ----------------------------------------------------------------------------------------


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def decode_attention(q: Any, keys: Any, values: Any, mask: Any, scale: float) -> torch.Tensor:
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None]
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)


def rope_decode_attention(
    q: Any, key: Any, value: Any, cos: Any, sin: Any, keys: Any, values: Any, position: Any, mask: Any, scale: float
) -> torch.Tensor:
    cos, sin = cos.view(-1, 1, 1, cos.shape[-1]), sin.view(-1, 1, 1, sin.shape[-1])
    keys.index_copy_(2, position, rope(key, cos, sin))
    values.index_copy_(2, position, value)
    return decode_attention(rope(q, cos, sin), keys, values, mask, scale)


def gemv(x: Any, weights: Any, biases: Any, gated: bool) -> torch.Tensor:
    results = [F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    return F.silu(results[0]) * results[1] if gated else torch.cat(results, -1)


def rmsnorm_gemv(
    x: Any, residual: Any, norm: Any, eps: float, weights: Any, biases: Any, gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if residual is None else x + residual
    return gemv(rms_norm(total, norm, eps), weights, biases, gated), total


REFERENCES = {f.__name__: f for f in (decode_attention, rope_decode_attention, gemv, rmsnorm_gemv)}


def rewrite(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[GraphModule, list[str]]:
    """The program after the rewrite, which must compute what it did before; and the kernels in it, in order."""
    module = trace(function, [x.clone() for x in inputs])
    count = use_decode_kernels(module, inputs)
    module.graph.lint()
    kernels = {getattr(torch.ops.paraxis, name).default: name for name in REFERENCES}
    found = [node for node in module.graph.nodes if node.target in kernels]
    assert count == len(found)
    names = [kernels[node.target] for node in found]
    for node, name in zip(found, names, strict=True):
        node.target = REFERENCES[name]
    module.recompile()
    assert_same_results(module, function, inputs)
    return module, names


# -- attention -------------------------------------------------------------------------------------------------------

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
    module, kernels = rewrite(lambda *inputs: layer(*inputs, write=write), draw(batch, dtype=dtype))
    assert kernels == ["rope_decode_attention"]
    left = set(targets(module))
    assert not left & {aten.index_put_.default, aten.index_copy_.default, aten.cat.default, aten.expand.default}
    assert aten.arange.start_step not in left and aten.arange.default not in left, "the counter is the position"


@pytest.mark.parametrize("scale", [None, 0.3])
def test_scale_and_a_missing_mask(scale: float | None) -> None:
    _, kernels = rewrite(lambda *inputs: layer(*inputs[:-1], scale=scale), draw())
    assert kernels == ["rope_decode_attention"]


def test_additive_mask() -> None:
    *inputs, mask = draw()
    _, kernels = rewrite(layer, [*inputs, torch.zeros(mask.shape).masked_fill(~mask, -1e9)])
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
    _, kernels = rewrite(lambda *inputs: layer(*inputs, rotate=rope_in_reverse, rotate_key=rope_in_reverse), draw())
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
    _, kernels = rewrite(lambda *inputs: layer(*inputs, **{which: rotate}), draw())
    assert kernels == ["decode_attention"]


def key_with_other_angles(q: Any, k: Any, v: Any, cos: Any, sin: Any, *others: Any) -> Any:
    return layer(q, k, v, cos, sin, *others, rotate_key=lambda x, cos, sin: rope(x, sin, cos))


def cache_read_before(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, *others: Any) -> Any:
    before = keys.sum()
    return layer(q, k, v, cos, sin, keys, *others), before


def cache_returned(*inputs: Any) -> Any:
    result = layer(*inputs)
    return result, inputs[6] + 0


@pytest.mark.parametrize("model", [key_with_other_angles, cache_read_before, cache_returned])
def test_writes_stay_where_the_kernel_must_not_do_them(model: Callable[..., Any]) -> None:
    module, kernels = rewrite(model, draw())
    assert kernels == ["decode_attention"]
    assert targets(module).count(aten.index_put_.default) == 2


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


def written_elsewhere(*inputs: Any) -> Any:
    return layer(*inputs, write=lambda cache, at, rows: cache.index_copy_(3, at, rows.transpose(2, 3)[:, :, :LENGTH]))


def cache_that_is_no_input(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, *others: Any) -> Any:
    return layer(q, k, v, cos, sin, keys * 1, values * 1, *others)


def mask_per_head(*inputs: Any) -> Any:
    return layer(*inputs[:-1], inputs[-1].expand(-1, HEADS * GROUPS, -1, -1))


def mask_of_one_key(*inputs: Any) -> Any:
    return layer(*inputs[:-1], inputs[-1][..., :1])


def mask_in_float64(*inputs: Any) -> Any:
    return layer(*inputs[:-1], inputs[-1].double())


def repeated_in_another_order(*inputs: Any) -> Any:
    q, k, v, cos, sin, keys, values, counter, mask = inputs
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
    _, kernels = rewrite(model, draw())
    assert kernels == []


@pytest.mark.parametrize(
    "shape",
    [{"features": 24}, {"features": 8}, {"features": 512}, {"dtype": torch.float64}, {"queries": 2}],
    ids=str,
)
def test_shapes_and_dtypes_that_the_kernel_does_not_take(shape: dict[str, Any]) -> None:
    _, kernels = rewrite(layer, draw(**shape))
    assert kernels == []


def test_attention_with_dropout_stays() -> None:
    inputs = draw()
    module = trace(lambda *inputs: layer(*inputs, dropout_p=0.1), [x.clone() for x in inputs])
    assert use_decode_kernels(module, inputs) == 0


@pytest.mark.parametrize("which", [5, 6], ids=["keys", "values"])
def test_caches_whose_features_are_not_contiguous(which: int) -> None:
    inputs = draw()
    inputs[which] = inputs[which].transpose(2, 3).contiguous().transpose(2, 3)
    _, kernels = rewrite(layer, inputs)
    assert kernels == []


def test_caches_of_different_shapes() -> None:
    inputs = draw()
    inputs[2], inputs[6] = inputs[2].repeat(1, 1, 1, 2), inputs[6].repeat(1, 1, 1, 2)
    _, kernels = rewrite(layer, inputs)
    assert kernels == []


# -- counters and outer products -------------------------------------------------------------------------------------


def test_counters_are_incremented_together_at_the_end() -> None:
    def model(x: Any, first: Any, second: Any) -> Any:
        before = x + first
        first.add_(1)
        second.add_(1)
        return before * 2

    inputs = [torch.rand(4), torch.tensor(3), torch.tensor(5)]
    module = trace(model, inputs)
    merge_counter_increments(module.graph)
    module.recompile()
    assert targets(module)[-1] is aten._foreach_add_.Scalar and aten.add_.Tensor not in targets(module)
    assert_same_results(module, model, inputs)


def read_later(x: Any, counter: Any) -> Any:
    counter.add_(1)
    return x + counter


def read_through_an_alias(x: Any, counter: Any) -> Any:
    alias = counter.to(torch.int64)
    counter.add_(1)
    return x + alias


def several_elements(x: Any, counter: Any) -> Any:
    x.add_(1)
    return counter + 1


def copied_first(x: Any, counter: Any) -> Any:
    count = counter * 1
    count.add_(1)
    return x * 2


@pytest.mark.parametrize("model", [read_later, read_through_an_alias, several_elements, copied_first])
def test_other_increments_stay(model: Callable[..., Any]) -> None:
    inputs = [torch.rand(4), torch.tensor(3)]
    module = trace(model, inputs)
    merge_counter_increments(module.graph)
    module.recompile()
    assert aten._foreach_add_.Scalar not in targets(module)
    assert_same_results(module, model, inputs)


def test_position_stays_where_its_counter_changes() -> None:
    """The alias would change too. Here every layer has incremented the counter before the kernel reads it."""

    def model(*inputs: Any) -> Any:
        result = layer(*inputs)
        inputs[7].mul_(2)
        return result, inputs[7] + 1

    module, kernels = rewrite(model, draw())
    assert kernels == ["rope_decode_attention"] and aten.add.Tensor in targets(module)


@pytest.mark.parametrize(
    ("shapes", "mul"), [(((3, 1), (1, 4)), True), (((3, 2), (2, 4)), False), (((1,), (1, 4)), False)]
)
def test_outer_products_are_elementwise(shapes: Any, mul: bool) -> None:
    inputs = [torch.rand(shape) for shape in shapes]
    module = trace(torch.matmul, inputs)
    decompose_outer_products(module.graph)
    module.recompile()
    assert (aten.mul.Tensor in targets(module)) == mul
    assert_same_results(module, torch.matmul, inputs)


# -- linear layers ---------------------------------------------------------------------------------------------------


def row(features: int = 32, dtype: torch.dtype = torch.float32, rows: int = 1) -> list[torch.Tensor]:
    """A row, a residual, the weight of a norm, and four weights."""
    torch.manual_seed(0)
    x, residual = (torch.randn(1, rows, features, dtype=dtype) for _ in range(2))
    weights = [torch.randn(n, features, dtype=dtype) / 8 for n in (24, 24, 8, 8)]
    return [x, residual, torch.rand(features, dtype=dtype), *weights]


def three_linears(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    h = rms_norm(x + residual, norm)
    return [F.linear(h, w) for w in weights[:3]], x + residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_linears_become_one_kernel(dtype: torch.dtype) -> None:
    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        total = x + residual
        h = rms_norm(total, norm)
        return [F.linear(h, w) for w in weights[:3]], total

    module, kernels = rewrite(model, row(dtype=dtype))
    assert kernels == ["rmsnorm_gemv"]
    assert not {aten.linear.default, aten.rsqrt.default, aten.add.Tensor} & set(targets(module))


def test_norm_without_a_residual_and_a_slice_of_everything() -> None:
    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        return F.linear(rms_norm(x, norm)[:, 0:], weights[0])

    _, kernels = rewrite(model, row())
    assert kernels == ["rmsnorm_gemv"]


def test_more_linears_than_a_kernel_takes() -> None:
    _, kernels = rewrite(lambda x, _, norm, *weights: [F.linear(rms_norm(x, norm), w) for w in weights], row())
    assert kernels == ["rmsnorm_gemv"] * 4, "each has a norm of its own here"

    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        h = rms_norm(x, norm)
        return [F.linear(h, w) for w in weights]

    _, kernels = rewrite(model, row())
    assert kernels == ["rmsnorm_gemv", "rmsnorm_gemv"]


def test_linears_with_and_without_bias_are_separate_kernels() -> None:
    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        *weights, bias = weights
        return [F.linear(x, weights[0], bias), F.linear(x, weights[1]), F.linear(x, weights[2])]

    _, kernels = rewrite(model, [*row(), torch.randn(24)])
    assert kernels == ["gemv", "gemv"]


def gated(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    h = rms_norm(x + residual, norm)
    return F.silu(F.linear(h, weights[0])) * F.linear(h, weights[1])


def gated_in_another_order(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    h = rms_norm(x + residual, norm)
    up = F.linear(h, weights[0])
    return up * F.silu(F.linear(h, weights[1]))


@pytest.mark.parametrize("model", [gated, gated_in_another_order])
def test_gate_is_part_of_the_kernel(model: Callable[..., Any]) -> None:
    module, kernels = rewrite(model, row())
    assert kernels == ["rmsnorm_gemv"]
    assert aten.silu.default not in targets(module) and aten.slice.Tensor not in targets(module)


def gate_by_sigmoid(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return torch.sigmoid(F.linear(x, weights[0])) * F.linear(x, weights[1])


def gate_that_is_added(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return F.silu(F.linear(x, weights[0])) + F.linear(x, weights[1])


def gate_used_elsewhere(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    gate = F.silu(F.linear(x, weights[0]))
    return gate * F.linear(x, weights[1]), gate + 1


def linear_used_elsewhere(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    up = F.linear(x, weights[1])
    return F.silu(F.linear(x, weights[0])) * up, up + 1


def gate_of_something_else(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    gate, up = F.linear(x, weights[0]), F.linear(x, weights[1])
    return F.silu(gate + 1) * up


@pytest.mark.parametrize(
    "model", [gate_by_sigmoid, gate_that_is_added, gate_used_elsewhere, linear_used_elsewhere, gate_of_something_else]
)
def test_other_gates_stay(model: Callable[..., Any]) -> None:
    module, kernels = rewrite(model, row())
    assert kernels == ["gemv"]
    assert targets(module).count(aten.slice.Tensor) == 2, "the two results of the kernel"


def normalized(x: torch.Tensor, power: int = 2, dim: int = -1, keepdim: bool = True, eps: Any = 1e-6) -> torch.Tensor:
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(power).mean(dim, keepdim=keepdim) + eps)).to(x.dtype)


def square_root(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def of_another_row(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6)


def weighted_eps(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1e-6, alpha=2))


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: normalized(x, power=4),
        lambda x: normalized(x, dim=1),
        lambda x: normalized(x.view(-1, 32), keepdim=False).view(1, 1, -1),
        lambda x: normalized(x, eps=x.mean().abs()),
        square_root,
        of_another_row,
        weighted_eps,
    ],
    ids=["power", "dim", "keepdim", "eps that is a tensor", "square root", "another row", "weighted eps"],
)
def test_linear_alone_becomes_a_kernel_where_the_norm_differs(norm: Callable[..., Any]) -> None:
    _, kernels = rewrite(lambda x, _, weight, *weights: F.linear(weight * norm(x), weights[0]), row())
    assert kernels == ["gemv"]


def norm_in_bfloat16(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    """Without a cast the mean is rounded, which the kernel does not do."""
    return F.linear(norm * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), weights[0])


def weight_of_the_norm_is_computed(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return F.linear(rms_norm(x, norm + 1), weights[0])


def weight_of_the_norm_is_a_number(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return F.linear(normalized(x) * 2.0, weights[0])


def weight_of_the_norm_is_broadcast(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return F.linear(rms_norm(x, residual), weights[0])


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (norm_in_bfloat16, torch.bfloat16),
        (weight_of_the_norm_is_computed, torch.float32),
        (weight_of_the_norm_is_a_number, torch.float32),
        (weight_of_the_norm_is_broadcast, torch.float32),
    ],
)
def test_norms_with_other_weights_and_dtypes_stay(model: Callable[..., Any], dtype: torch.dtype) -> None:
    _, kernels = rewrite(model, row(dtype=dtype))
    assert kernels == ["gemv"]


def test_sum_of_rows_of_different_shapes_stays() -> None:
    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        return F.linear(rms_norm(x + norm, norm), weights[0])

    module, kernels = rewrite(model, row())
    assert kernels == ["rmsnorm_gemv"] and aten.add.Tensor in targets(module)


def linear(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return F.linear(x, weights[0])


def weight_is_computed(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return F.linear(x, weights[0] * 1)


def bias_is_computed(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return F.linear(x, weights[0], weights[1][:, 0] * 1)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (linear, {"rows": 2}),
        (linear, {"features": 24}),
        (linear, {"features": MAX_ROW_FEATURES + 16}),
        (linear, {"dtype": torch.float64}),
        (weight_is_computed, {}),
        (bias_is_computed, {}),
    ],
)
def test_linears_that_the_kernel_does_not_take(model: Callable[..., Any], shape: dict[str, Any]) -> None:
    _, kernels = rewrite(model, row(**shape))
    assert kernels == []


def test_weight_that_is_not_contiguous() -> None:
    inputs = row()
    inputs[3] = inputs[3].T.contiguous().T
    _, kernels = rewrite(linear, inputs)
    assert kernels == []


def test_weight_without_rows() -> None:
    inputs = row()
    inputs[3] = inputs[3][:0]
    _, kernels = rewrite(linear, inputs)
    assert kernels == []
