"""Linear layers with quantized weights on one row become one kernel, with the norm before and the gate after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import targets, trace
from kernels.quantized.cases import case
from optimize.decode_kernels.reference import needs_kernels, register

from paraxis.kernels.quantized import Encoding
from paraxis.kernels.quantized.encoding import INT4
from paraxis.optimize.decode_kernels import use_decode_kernels
from paraxis.optimize.quantized_linears import use_quantized_linears
from paraxis.tensor.quantized import QuantizedTensor

pytestmark = needs_kernels
WIDTH = 32
GROUPS = Encoding((1, 32), INT4)


def quantized(rows: int, encoding: Encoding = GROUPS, **options: Any) -> QuantizedTensor:
    parts, encoding, weight = case(rows, WIDTH, encoding, **options)
    return QuantizedTensor(parts, encoding, weight.shape, torch.float32)


def rewrite(function: Callable[..., Any], inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph of a function of plain weights, called with quantized ones, with decode kernels."""
    register()
    plain = [x.dequantized() if isinstance(x, QuantizedTensor) else x for x in inputs]
    module = trace(function, plain)
    use_quantized_linears(module, inputs)
    use_decode_kernels(module, inputs)
    for found, expected in zip(module(*inputs), function(*plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return module


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def several(x: Any, residual: Any, norm: Any, *weights: Any) -> tuple[torch.Tensor, ...]:
    return tuple(F.linear(x, w) for w in weights)


def block(x: Any, residual: Any, norm: Any, gate: Any, up: Any) -> tuple[torch.Tensor, ...]:
    total = x + residual
    row = rms_norm(total, norm)
    return F.silu(F.linear(row, gate)) * F.linear(row, up), total * 2


def draw() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 1, WIDTH), torch.randn(1, 1, WIDTH), torch.rand(WIDTH)]


def test_layers_of_one_form_share_a_kernel() -> None:
    module = rewrite(several, [*draw(), quantized(8), quantized(24), quantized(16), quantized(40)])
    assert targets(module).count(torch.ops.paraxis.quantized_gemv.default) == 2


def test_layers_of_several_forms_do_not_share_a_kernel() -> None:
    other = quantized(8, Encoding((16, 16)))
    module = rewrite(several, [*draw(), quantized(8), other, quantized(8, zeros=True)])
    assert targets(module).count(torch.ops.paraxis.quantized_gemv.default) == 3


def test_one_scale_for_each_of_several_sizes() -> None:
    module = rewrite(several, [*draw(), quantized(8, Encoding((8, 32))), quantized(24, Encoding((24, 32)))])
    assert targets(module).count(torch.ops.paraxis.quantized_gemv.default) == 1


def test_norm_residual_sum_and_gate_are_fused() -> None:
    module = rewrite(block, [*draw(), quantized(24), quantized(24)])
    found = targets(module)
    assert found.count(torch.ops.paraxis.rmsnorm_quantized_gemv.default) == 1
    assert torch.ops.aten.silu.default not in found


@pytest.mark.parametrize("why", ["rows", "index"])
def test_what_the_kernel_does_not_compute_stays(why: str) -> None:
    inputs = [*draw(), quantized(8, index="columns" if why == "index" else "")]
    if why == "rows":
        inputs[0] = torch.randn(1, 3, WIDTH)
    module = rewrite(several, inputs)
    assert targets(module).count(torch.ops.paraxis.quantized_linear.default) == 1
