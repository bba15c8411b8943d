"""FP4: rounding, and what is stored for a weight."""

from __future__ import annotations

import pytest
import torch
from models.quantized_formats import CASES, NUMBERS_OF_FP4

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.fp4 import ExpertsMXFP4, PackedFP4, exponents_of, parse, to_fp4


def test_rounding_to_the_nearest() -> None:
    values = torch.linspace(-7, 7, 561)
    found = NUMBERS_OF_FP4[to_fp4(values).long()]
    nearest = (values.unsqueeze(-1) - NUMBERS_OF_FP4).abs().amin(-1)
    assert torch.allclose((found - values).abs(), nearest, atol=1e-5)
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5])
    assert NUMBERS_OF_FP4[to_fp4(halfway).long()].tolist() == [0, 1, 1, 2, 2, 4, 4, -2]


def test_exponents_are_those_of_the_largest() -> None:
    assert (exponents_of(torch.tensor([4.0, 7.9, 8.0, 0.0])).int() - 127).tolist() == [0, 0, 1, -127]


@pytest.mark.parametrize("case", ["ct-mxfp4", "ct-nvfp4"])
def test_sizes_that_do_not_divide(case: str) -> None:
    weight = torch.randn(37, 50, generator=torch.Generator().manual_seed(0))
    tensors = CASES[case].format.quantize(weight)
    found = CASES[case].dequantize(tensors, (37, 50))
    assert float((found - weight).abs().max()) < 0.3 * float(weight.abs().max())
    for suffix, tensor in CASES[case].format.tensors((37, 50)).items():
        if suffix in tensors:
            assert tensor.shape in (None, tuple(tensors[suffix].shape)) and tensors[suffix].dtype in tensor.dtypes


@pytest.mark.parametrize(
    ("value", "problem"), [([0.0], "zero"), ([float("nan")], "NaN"), ([1.0, 2.0], "not one number")]
)
def test_a_number_that_scales_cannot_be_divided_by(value: list[float], problem: str) -> None:
    format, tensors = PackedFP4(True), {".weight_global_scale": torch.tensor(value)}
    with pytest.raises(CheckpointError, match=f"weight_global_scale .*{problem}"):
        format.refined(tensors, lambda suffix, _: tensors[suffix])
    assert format.refined({}, lambda *_: torch.ones(1)) is format


def test_experts_are_stored_in_blocks() -> None:
    weight = torch.randn(3, 10, 64, generator=torch.Generator().manual_seed(0))
    tensors = ExpertsMXFP4().quantize(weight)
    assert tensors["_blocks"].shape == (3, 10, 2, 16) and tensors["_scales"].shape == (3, 10, 2)
    found = CASES["mxfp4"].dequantize(tensors, (3, 64, 10)).transpose(-1, -2)
    assert float((found - weight).abs().max()) < 0.3 * float(weight.abs().max())
    with pytest.raises(CheckpointError, match="dequantize=True"):
        parse({"dequantize": True})
