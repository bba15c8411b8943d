"""GEMV with quantized weights, fused with the residual sum and RMSNorm before and the SiLU gate after."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernels.triton.quantized_weights import DEVICE, INTERPRETED, error, needs_gpu, weight

from paraxis.kernels.quantized import dequantize

pytestmark = needs_gpu


@pytest.mark.parametrize("form", ["float8 blocks", "int8 zeros", "int4", "uint4", "exponents"])
@pytest.mark.parametrize("gated", [False, True])
def test_norm_residual_and_gate_are_those_of_the_operators(form: str, gated: bool) -> None:
    from paraxis.kernels.triton.quantized_gemv import launch

    torch.manual_seed(0)
    columns, eps = 384, 1e-5
    sizes = [256, 256] if gated else [256, 128, 40]
    weights = [weight(form, rows, columns) for rows in sizes]
    encoding = weights[0][1]
    exact = [dequantize(parts, encoding, columns, torch.float64) for parts, encoding in weights]
    parts = [parts.map(lambda t: t.to(DEVICE)) for parts, _ in weights]
    x, residual, by = (torch.randn(n, columns).to(DEVICE) for n in (1, 1, 1))
    total = torch.empty_like(x)
    found = launch(x, residual, by[0], eps, parts, encoding, [], gated, total, pdl=not INTERPRETED)
    row = (x + residual).cpu().double()
    assert torch.allclose(total.cpu().double(), row)
    row = row * torch.rsqrt(row.pow(2).mean() + eps) * by.cpu().double()
    outputs = [row @ w.T for w in exact]
    expected = F.silu(outputs[0]) * outputs[1] if gated else torch.cat(outputs, -1)
    assert error(found.cpu(), expected) < 1e-5
