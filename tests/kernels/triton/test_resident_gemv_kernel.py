"""GEMV with quantized weights by few programs that hold the row in registers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernels.triton.quantized_weights import DEVICE, INTERPRETED, ROUNDING, error, needs_gpu, weight

from paraxis.kernels.quantized import dequantize

pytestmark = needs_gpu


@pytest.mark.parametrize(
    "form", ["float8 blocks", "float8 e5m2", "int8 rows", "int8 zeros", "int4", "int4 rows", "uint4"]
)
@pytest.mark.parametrize("gated", [False, True])
def test_few_programs_for_many_rows(form: str, gated: bool) -> None:
    """The row is held in registers, in several steps, while programs run over tiles of several weights."""
    from paraxis.kernels.triton.quantized_gemv import Sizes, launch

    torch.manual_seed(0)
    columns = 384
    sizes = [40, 40] if gated else [40, 12, 9]
    weights = [weight(form, rows, columns) for rows in sizes]
    encoding = weights[0][1]
    exact = [dequantize(parts, encoding, columns, torch.float64) for parts, encoding in weights]
    parts = [parts.map(lambda t: t.to(DEVICE)) for parts, _ in weights]
    x = torch.randn(1, columns).to(DEVICE, torch.bfloat16)
    tile = Sizes(4, 2, 1, 3)
    found = launch(x, None, None, 0.0, parts, encoding, [], gated, None, tile, pdl=not INTERPRETED)
    outputs = [x.cpu().double() @ w.T for w in exact]
    expected = F.silu(outputs[0]) * outputs[1] if gated else torch.cat(outputs, -1)
    assert error(found.cpu(), expected) < 3 * ROUNDING


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_give_results_that_are_not(value: float) -> None:
    from paraxis.kernels.triton.quantized_gemv import Sizes, launch

    parts, encoding = weight("int4", 8, 256)
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    x[0, 130] = value
    moved = parts.map(lambda t: t.to(DEVICE))
    tile = Sizes(4, 2, 1, 3)
    found = launch(x.to(DEVICE), None, None, 0.0, [moved], encoding, [], False, None, tile, pdl=not INTERPRETED)
    assert not found.isfinite().any()
