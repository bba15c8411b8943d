"""GEMV with quantized weights on a GPU against the dequantized weight, in every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels.triton.quantized_weights import DEVICE, FORMS, INTERPRETED, ROUNDING, error, needs_gpu, weight

from paraxis.kernels.quantized import dequantize

pytestmark = needs_gpu


SHAPES = [(48, 256), (33, 1808), (300, 4096)] if not INTERPRETED else [(9, 272), (132, 128)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_result_is_that_of_the_dequantized_weight(form: str, shape: Any) -> None:
    from paraxis.kernels.quantized.gemv import fits
    from paraxis.kernels.triton.quantized_gemv import launch

    torch.manual_seed(0)
    rows, columns = shape
    parts, encoding = weight(form, rows, columns)
    exact = dequantize(parts, encoding, columns, torch.float64)
    parts = parts.map(lambda t: t.to(DEVICE))
    assert fits(parts, encoding, columns)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1, columns).to(DEVICE, dtype)
        bias = torch.randn(rows).to(DEVICE, dtype)
        found = launch(x, None, None, 0.0, [parts], encoding, [bias], False, None, pdl=not INTERPRETED)
        assert found.dtype == dtype
        expected = F.linear(x.cpu().double(), exact, bias.cpu().double())
        assert error(found.cpu(), expected) < (5e-6 if dtype == torch.float32 else ROUNDING)
