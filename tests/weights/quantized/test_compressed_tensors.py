"""Compressed tensors: what is stored is what the library's own description says."""

from __future__ import annotations

import pytest
import torch
from models.quantized_formats import CASES

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.compressed_tensors import NaiveQuantized, PackedIntegers, check_group

PACKED = [name for name in CASES if isinstance(CASES[name].format, PackedIntegers)]
NAIVE = [name for name in CASES if isinstance(CASES[name].format, NaiveQuantized)]


@pytest.mark.parametrize("case", [*PACKED, *NAIVE])
def test_sizes_that_do_not_divide(case: str) -> None:
    weight = torch.randn(37, 50, generator=torch.Generator().manual_seed(0))
    format = CASES[case].format
    if "ordered" in case:
        weight = weight[:, :32]
    tensors = format.quantize(weight)
    found = CASES[case].dequantize(tensors, tuple(weight.shape))
    worst = 0.3 if getattr(format, "bits", 8) == 4 else 0.07
    assert float((found - weight).abs().max()) < worst * float(weight.abs().max())
    for suffix, tensor in format.tensors(tuple(weight.shape)).items():
        if suffix in tensors:
            assert tensor.shape in (None, tuple(tensors[suffix].shape)) and tensors[suffix].dtype in tensor.dtypes


@pytest.mark.parametrize("case", PACKED)
def test_a_box_is_a_part_of_the_weight(case: str) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    format = CASES[case].format
    tensors, asked = format.quantize(weight), list[int]()

    def read(suffix: str, index: object) -> torch.Tensor:
        found = tensors[suffix]
        for dim, ranges in enumerate(index or ()):  # type: ignore[var-annotated, arg-type]
            found = torch.cat([found.narrow(dim, a, b - a) for a, b in ranges], dim)
        asked.append(found.numel())
        return found

    unit = 2 if getattr(format, "bits", 8) == 4 else 1
    full = format.load("codes", (((0, 40),), ((0, 96 // unit),)), read, (40, 96))
    box = format.load("codes", (((3, 7), (20, 21)), ((5 // unit, 30 // unit),)), read, (40, 96))
    assert torch.equal(box, full[[3, 4, 5, 6, 20], 5 // unit : 30 // unit]) and asked[1] < asked[0] / 10


def test_sizes_of_groups() -> None:
    assert check_group(32, "group_size") == 32
    for bad in (0, -1, 7, None, "x"):
        with pytest.raises(CheckpointError, match="group_size=.* is not a positive even number"):
            check_group(bad, "group_size")
