"""Experts with quantized weights on a GPU: every row is multiplied by the weight of its expert."""

from __future__ import annotations

import pytest
import torch
from kernels.triton.quantized_weights import DEVICE, error, needs_gpu, weight

from paraxis.kernels.quantized import Parts, dequantize

pytestmark = needs_gpu


@pytest.mark.parametrize("form", ["exponents", "float8 blocks", "int4", "uint4", "int8 rows"])
def test_rows_are_multiplied_by_their_experts(form: str) -> None:
    from paraxis.kernels.triton.grouped_gemv import fits, launch

    torch.manual_seed(0)
    rows, columns = 40, 256
    each = [weight(form, rows, columns) for _ in range(4)]
    encoding = each[0][1]
    parts = Parts(*(None if t[0] is None else torch.stack(t) for t in zip(*(p for p, _ in each), strict=True)))
    x = torch.randn(6, columns)
    ends = torch.tensor([2, 2, 3, 5], dtype=torch.int32)
    expected = torch.zeros(6, rows, dtype=torch.float64)
    for row, expert in enumerate([0, 0, 2, 3, 3]):
        expected[row] = dequantize(each[expert][0], encoding, columns, torch.float64) @ x[row].double()
    moved, on_device = parts.map(lambda t: t.to(DEVICE)), x.to(DEVICE)
    assert fits(on_device, moved, encoding)
    found = launch(on_device, moved, encoding, ends.to(DEVICE)).cpu()
    assert error(found, expected) < 1e-5 and not found[5].any()


def test_rows_and_weights_that_the_kernel_does_not_take() -> None:
    from paraxis.kernels.triton.grouped_gemv import fits

    parts, encoding = weight("int4", 32, 256)
    stack = parts.map(lambda t: t.unsqueeze(0))
    assert fits(torch.zeros(2, 256), stack, encoding)
    assert not fits(torch.zeros(100, 256), stack, encoding)
    assert not fits(torch.zeros(2, 256), parts, encoding)
    assert not fits(torch.zeros(2, 256), stack._replace(columns=torch.zeros(256)), encoding)
