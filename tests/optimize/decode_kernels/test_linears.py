"""Linear layers on one row become GEMVs, with the residual sum and RMS norm before and the SiLU gate after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, targets, trace
from optimize.decode_kernels.reference import DEVICE, needs_kernels, register

from paraxis.optimize.decode_kernels import use_decode_kernels

pytestmark = needs_kernels
aten = torch.ops.aten
WIDTH = 32


def draw(*rows: int, width: int = WIDTH) -> list[torch.Tensor]:
    """A row, another row, the weight of a norm, and weights with so many rows."""
    torch.manual_seed(0)
    states = [torch.randn(1, 1, width), torch.randn(1, 1, width), torch.rand(width)]
    return [x.to(DEVICE) for x in (*states, *(torch.randn(n, width) for n in rows))]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As models write it."""
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rewrite(function: Callable[..., Any], inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph of a function with decode kernels."""
    register()
    module = trace(function, inputs)
    use_decode_kernels(module, inputs)
    return module


def several(x: Any, residual: Any, norm: Any, *weights: Any) -> list[torch.Tensor]:
    return [F.linear(x, w) for w in weights]


@pytest.mark.parametrize(("rows", "kernels"), [((8,), 1), ((8, 24, 16), 1), ((8, 8, 8, 8), 2)])
def test_layers_on_one_row_share_a_kernel(rows: tuple[int, ...], kernels: int) -> None:
    """Up to three, such as query, key and value."""
    inputs = draw(*rows)
    module = rewrite(several, inputs)
    assert targets(module).count(torch.ops.paraxis.gemv.default) == kernels
    assert aten.linear.default not in targets(module)
    assert_same_results(module, several, inputs)


def normed(x: Any, residual: Any, norm: Any, a: Any, b: Any) -> tuple[torch.Tensor, ...]:
    row = rms_norm(x, norm)
    return F.linear(row, a), F.linear(row, b)


def residual_block(x: Any, residual: Any, norm: Any, gate: Any, up: Any) -> tuple[torch.Tensor, ...]:
    total = x + residual
    row = rms_norm(total, norm)
    return F.silu(F.linear(row, gate)) * F.linear(row, up), total * 2


@pytest.mark.parametrize("function", [normed, residual_block])
def test_norm_residual_sum_and_gate_are_fused(function: Callable[..., Any]) -> None:
    inputs = draw(24, 24)
    module = rewrite(function, inputs)
    assert targets(module).count(torch.ops.paraxis.rmsnorm_gemv.default) == 1
    assert not set(targets(module)) & {aten.linear.default, aten.rsqrt.default, aten.silu.default}
    assert_same_results(module, function, inputs, rtol=1e-5, atol=1e-5)


def gate_read_again(x: Any, residual: Any, norm: Any, gate: Any, up: Any) -> tuple[torch.Tensor, ...]:
    first = F.linear(x, gate)
    return F.silu(first) * F.linear(x, up), first


def test_gate_that_is_read_again_is_not_fused() -> None:
    inputs = draw(24, 24)
    module = rewrite(gate_read_again, inputs)
    assert aten.silu.default in targets(module) and aten.linear.default not in targets(module)
    assert_same_results(module, gate_read_again, inputs)


def two_rows(x: Any, residual: Any, norm: Any, weight: Any) -> torch.Tensor:
    return F.linear(torch.cat([x, residual], 1), weight)


def computed_weight(x: Any, residual: Any, norm: Any, weight: Any) -> torch.Tensor:
    return F.linear(x, weight * 2)


@pytest.mark.parametrize(
    ("function", "width"), [(two_rows, WIDTH), (computed_weight, WIDTH), (several, 24)], ids=["rows", "weight", "width"]
)
def test_other_linear_layers_stay(function: Callable[..., Any], width: int) -> None:
    """Several rows, a weight that is no input, a width that is not divisible by 16."""
    assert aten.linear.default in targets(rewrite(function, draw(8, width=width)))
