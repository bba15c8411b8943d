"""GEMV with quantized weights as operators, and which weights the kernel takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernels.quantized.cases import case

from paraxis.kernels.quantized import Encoding, Parts
from paraxis.kernels.quantized.encoding import INT4
from paraxis.kernels.quantized.gemv import fits

_ops = torch.ops.paraxis
GROUPS = Encoding((1, 32), INT4)


@pytest.mark.parametrize("gated", [False, True])
def test_operators_compute_norm_layers_and_gate(gated: bool) -> None:
    (a, _, first), (b, _, second) = (case(24, 64, GROUPS), case(24 if gated else 40, 64, GROUPS))
    torch.manual_seed(0)
    x, residual, norm = torch.randn(1, 1, 64), torch.randn(1, 1, 64), torch.rand(64)
    parts = ([a.codes, b.codes], [a.scales, b.scales], [], [], [])
    total = (x + residual).double()
    row = total * torch.rsqrt(total.pow(2).mean() + 1e-5) * norm.double()
    for row_of, found in (
        (x.double(), _ops.quantized_gemv(x, *parts, GROUPS.key, [], gated)),
        (row, _ops.rmsnorm_quantized_gemv(x, residual, norm, 1e-5, *parts, GROUPS.key, [], gated)[0]),
    ):
        outputs = [row_of @ first.T, row_of @ second.T]
        expected = F.silu(outputs[0]) * outputs[1] if gated else torch.cat(outputs, -1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    _, summed = _ops.rmsnorm_quantized_gemv(x, residual, norm, 1e-5, *parts, GROUPS.key, [], gated)
    assert torch.equal(summed, x + residual)


def test_operators_have_shapes_without_values() -> None:
    a, _, _ = case(24, 64, GROUPS)
    x = torch.randn(1, 1, 64)
    inputs = (x, [a.codes], [a.scales], [], [], [], GROUPS.key, [torch.zeros(24)], False)
    torch.library.opcheck(_ops.quantized_gemv.default, inputs, test_utils=("test_schema", "test_faketensor"))
    with_norm = (x, None, torch.rand(64), 1e-5, *inputs[1:])
    torch.library.opcheck(_ops.rmsnorm_quantized_gemv.default, with_norm, test_utils=("test_schema", "test_faketensor"))


def test_weights_that_the_kernel_takes() -> None:
    parts, encoding, _ = case(32, 256, GROUPS)
    assert fits(parts, encoding, 256)
    assert not fits(parts._replace(columns=torch.zeros(256, dtype=torch.int32)), encoding, 256)
    assert not fits(parts._replace(codes=parts.codes.t().contiguous().t()), encoding, 256)
    assert not fits(parts._replace(zeros=parts.scales[:1]), encoding, 256)
    assert not fits(parts, Encoding((1, 24), INT4), 256)
    assert not fits(Parts(parts.codes[:, :60].contiguous(), parts.scales), encoding, 120)
