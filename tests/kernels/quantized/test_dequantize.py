"""Dequantizing: every encoding, against arithmetic element by element in float64."""

from __future__ import annotations

import pytest
import torch
from kernels.quantized.cases import CASES

from paraxis.kernels.quantized import Encoding, Parts, dequantize
from paraxis.kernels.quantized.dequantize import decode


@pytest.mark.parametrize("name", CASES)
def test_every_encoding(name: str) -> None:
    parts, encoding, weight = CASES[name]
    found = dequantize(parts, encoding, weight.shape[-1], torch.float32)
    assert found.dtype == torch.float32 and torch.allclose(found.double(), weight, rtol=1e-6, atol=0)
    half = dequantize(parts, encoding, weight.shape[-1], torch.bfloat16)
    assert torch.equal(half, found.to(torch.bfloat16))


def test_products_are_rounded_to_the_dtype_of_the_format() -> None:
    parts = Parts(torch.tensor([[3]], dtype=torch.int8), torch.tensor([[0.1]], dtype=torch.float16))
    exact = dequantize(parts, Encoding(), 1, torch.float32)
    rounded = dequantize(parts, Encoding(rounding="float16"), 1, torch.float32)
    assert rounded.item() == (torch.tensor(3, dtype=torch.float16) * torch.tensor(0.1, dtype=torch.float16)).item()
    assert rounded.item() != exact.item()


def test_no_rows() -> None:
    parts = Parts(torch.empty(0, 32, dtype=torch.int8), torch.empty(0, 2))
    assert dequantize(parts, Encoding((1, 16)), 32, torch.float32).shape == (0, 32)


def test_every_float8_is_that_of_torch() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = every[~every.float().isnan()]
    for codes in (every, numbers, numbers[:0]):
        assert torch.equal(decode(codes, Encoding(), 0).nan_to_num(7), codes.float().nan_to_num(7))
