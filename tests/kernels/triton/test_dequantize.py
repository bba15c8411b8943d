"""Dequantizing on a GPU against the operators, in every form that an encoding has."""

from __future__ import annotations

import os

import pytest
import torch
from kernels.quantized.cases import CASES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs a GPU")


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_codes(name: str) -> None:
    from paraxis.kernels.triton.dequantize import launch

    parts, encoding, weight = CASES[name]
    found = launch(parts.map(lambda t: t.to(DEVICE)), encoding, weight.shape[-1], torch.float32)
    torch.testing.assert_close(found.cpu().double(), weight, rtol=1e-5, atol=1e-5)
