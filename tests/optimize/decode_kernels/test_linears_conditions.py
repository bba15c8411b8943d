"""Every condition of the GEMV kernels: linear layers, norms and gates that differ in one respect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import call_of, pretend, targets, trace
from optimize.decode_kernels.reference import register, rewrite_on_cpu
from torch.fx import GraphModule, Node

from paraxis.optimize.decode_kernels import use_decode_kernels
from paraxis.optimize.decode_kernels.linears import MAX_ROW_FEATURES

aten = torch.ops.aten


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def row(features: int = 32, dtype: torch.dtype = torch.float32, rows: int = 1) -> list[torch.Tensor]:
    """A row, a residual, the weight of a norm, and four weights."""
    torch.manual_seed(0)
    x, residual = (torch.randn(1, rows, features, dtype=dtype) for _ in range(2))
    weights = [torch.randn(n, features, dtype=dtype) / 8 for n in (24, 24, 8, 8)]
    return [x, residual, torch.rand(features, dtype=dtype), *weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_linears_become_one_kernel(dtype: torch.dtype) -> None:
    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        total = x + residual
        h = rms_norm(total, norm)
        return [F.linear(h, w) for w in weights[:3]], total

    module, kernels = rewrite_on_cpu(model, row(dtype=dtype))
    assert kernels == ["rmsnorm_gemv"]
    assert not {aten.linear.default, aten.rsqrt.default, aten.add.Tensor} & set(targets(module))


def test_norm_without_a_residual_and_a_slice_of_everything() -> None:
    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        return F.linear(rms_norm(x, norm)[0:], weights[0])

    _, kernels = rewrite_on_cpu(model, row())
    assert kernels == ["rmsnorm_gemv"]


def test_more_linears_than_a_kernel_takes() -> None:
    _, kernels = rewrite_on_cpu(lambda x, _, norm, *weights: [F.linear(rms_norm(x, norm), w) for w in weights], row())
    assert kernels == ["rmsnorm_gemv"] * 4, "each has a norm of its own here"

    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        h = rms_norm(x, norm)
        return [F.linear(h, w) for w in weights]

    _, kernels = rewrite_on_cpu(model, row())
    assert kernels == ["rmsnorm_gemv", "rmsnorm_gemv"]


def test_linears_with_and_without_bias_are_separate_kernels() -> None:
    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        *weights, bias = weights
        return [F.linear(x, weights[0], bias), F.linear(x, weights[1]), F.linear(x, weights[2])]

    _, kernels = rewrite_on_cpu(model, [*row(), torch.randn(24)])
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
    module, kernels = rewrite_on_cpu(model, row())
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
    module, kernels = rewrite_on_cpu(model, row())
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
    _, kernels = rewrite_on_cpu(lambda x, _, weight, *weights: F.linear(weight * norm(x), weights[0]), row())
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
    _, kernels = rewrite_on_cpu(model, row(dtype=dtype))
    assert kernels == ["gemv"]


def test_sum_of_rows_of_different_shapes_stays() -> None:
    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        return F.linear(rms_norm(x + norm, norm), weights[0])

    module, kernels = rewrite_on_cpu(model, row())
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
    _, kernels = rewrite_on_cpu(model, row(**shape))
    assert kernels == []


def test_weight_that_is_not_contiguous() -> None:
    inputs = row()
    inputs[3] = inputs[3].T.contiguous().T
    _, kernels = rewrite_on_cpu(linear, inputs)
    assert kernels == []


def test_weight_without_rows() -> None:
    inputs = row()
    inputs[3] = inputs[3][:0]
    _, kernels = rewrite_on_cpu(linear, inputs)
    assert kernels == []


# -- conditions that no model of torch violates alone: the examples say something else -------------------------------


@pytest.mark.parametrize(
    ("index", "example"),
    [
        (3, torch.empty(24, 32, dtype=torch.bfloat16)),
        (3, torch.empty(24)),
        (3, 3),
        (0, torch.empty(1, 1, 32, dtype=torch.int64)),
    ],
    ids=["weight in bfloat16", "weight of one dim", "weight that is no tensor", "row of integers"],
)
def test_examples_that_the_kernel_does_not_take(index: int, example: Any) -> None:
    register()
    module = trace(linear, row())
    assert use_decode_kernels(module, [*row()[:index], example, *row()[index + 1 :]]) == 0


def test_bias_in_another_dtype_stays() -> None:
    register()
    inputs = [*row(), torch.randn(24)]
    module = trace(lambda *inputs: F.linear(inputs[0], inputs[3], inputs[-1]), inputs)
    assert use_decode_kernels(module, [*inputs[:-1], inputs[-1].bfloat16()]) == 0


def fused_norms(inputs: list[Any], change: Callable[[GraphModule], Any] = lambda module: None) -> int:
    """Kernels with a norm in a program whose examples or nodes are others than those that it was traced with."""
    register()
    module = trace(lambda x, residual, norm, *weights: F.linear(rms_norm(x + residual, norm), weights[0]), row())
    change(module)
    use_decode_kernels(module, inputs)
    return targets(module).count(torch.ops.paraxis.rmsnorm_gemv.default)


def cast(module: GraphModule, index: int) -> Node:
    """The casts of the norm: of its input, and of its result."""
    return [n for n in module.graph.nodes if n.target in (aten.to.dtype, aten._to_copy.default)][index]


def strided_norm() -> list[Any]:
    inputs = row()
    return [*inputs[:2], torch.rand(64)[::2], *inputs[3:]]


def test_norm_matches_unless_it_is_changed() -> None:
    assert fused_norms(row()) == 1


@pytest.mark.parametrize(
    ("inputs", "change"),
    [
        (strided_norm(), lambda m: None),
        ([*row()[:2], torch.rand(32).bfloat16(), *row()[3:]], lambda m: None),
        ([*row()[:2], torch.rand(16), *row()[3:]], lambda m: None),
        (row(), lambda m: pretend(cast(m, 0), dtype=torch.float64)),
        (row(), lambda m: pretend(cast(m, -1), dtype=torch.bfloat16)),
        (row(), lambda m: pretend(call_of(m, aten.rsqrt.default), dtype=torch.float64)),
        (row(), lambda m: pretend(call_of(m, aten.add.Tensor), dtype=torch.bfloat16)),
    ],
    ids=[
        "weight that is not contiguous",
        "weight of another dtype",
        "weight of another size",
        "inside in float64",
        "result of another dtype",
        "inverse in float64",
        "input of another dtype",
    ],
)
def test_norm_that_differs_in_one_respect_stays(inputs: list[Any], change: Callable[[GraphModule], Any]) -> None:
    assert fused_norms(inputs, change) == 0


def sum_with_a_number(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return F.linear(rms_norm(x + 1.0, norm), weights[0])


def sum_with_a_cast(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return F.linear(rms_norm(x + residual.bfloat16(), norm), weights[0])


def weighted_sum(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
    return F.linear(rms_norm(torch.add(x, residual, alpha=2), norm), weights[0])


@pytest.mark.parametrize("model", [sum_with_a_number, sum_with_a_cast, weighted_sum])
def test_sums_that_are_no_residual_stay(model: Callable[..., Any]) -> None:
    module, kernels = rewrite_on_cpu(model, row())
    assert kernels == ["rmsnorm_gemv"] and aten.add.Tensor in targets(module)


def test_slice_of_a_row_is_not_the_row() -> None:
    def model(x: Any, residual: Any, norm: Any, *weights: Any) -> Any:
        both = rms_norm(torch.cat([x, residual], 1), norm)
        return F.linear(both[:, 1:], weights[0])

    _, kernels = rewrite_on_cpu(model, row())
    assert kernels == ["gemv"]
