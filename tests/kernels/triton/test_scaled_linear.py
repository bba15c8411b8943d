"""Linear layers in float8 on both sides, and the rounding of their inputs."""

from __future__ import annotations

import os

import pytest
import torch

from paraxis.kernels.quantized import Encoding, Parts, dequantize

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs a GPU")


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To float8 by 128 columns, in float64."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    return ((groups / scale).to(torch.float8_e4m3fn).double() * scale.double()).flatten(-2)


@pytest.mark.parametrize("shape", [(1, 128), (37, 1152), (64, 2048)])
def test_rows_are_rounded_by_groups_of_columns(shape: tuple[int, int]) -> None:
    from paraxis.kernels.triton.scaled_linear import round_rows

    torch.manual_seed(0)
    x = (torch.randn(shape) * 10).to(DEVICE, torch.bfloat16)
    x[:, :128] = 0
    codes, scales = round_rows(x)
    assert codes.shape[0] % 16 == 0 and scales.stride(0) == 1
    found = codes.cpu().double().unflatten(-1, (-1, 128)) * scales.cpu().double()[:, :, None]
    wrong = (found.flatten(-2)[: shape[0]] - rounded(x.cpu())).abs() > 1e-5 * x.cpu().abs()
    assert wrong.double().mean() <= (0.04 if INTERPRETED else 0)  # the interpreter does not carry into the exponent
    assert not found[shape[0] :].any()


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("columns", [512, 1792])
def test_layers_are_those_of_the_rounded_input(columns: int) -> None:
    from paraxis.kernels.triton.scaled_linear import fits, scaled_linear

    torch.manual_seed(0)
    x = torch.randn(2, 19, columns, device=DEVICE, dtype=torch.bfloat16)
    codes = torch.randn(384, columns, device=DEVICE).to(torch.float8_e4m3fn)
    parts = Parts(codes, torch.rand(3, columns // 128, device=DEVICE) + 0.5)
    encoding = Encoding((128, 128), activations="float8 128")
    if not fits(x, parts, encoding):
        pytest.skip("torch has no GEMM for scales per block on this GPU")
    bias = torch.randn(384, device=DEVICE, dtype=torch.bfloat16)
    exact = rounded(x.cpu()) @ dequantize(parts.map(torch.Tensor.cpu), encoding, columns, torch.float64).T
    found = scaled_linear(x, parts, None).cpu().double()
    assert found.shape == (2, 19, 384) and (found - exact).norm() < 1e-2 * exact.norm()
    with_bias = scaled_linear(x, parts, bias).cpu().double() - bias.cpu().double()
    assert (with_bias - exact).norm() < 1e-2 * exact.norm()
