"""FP8: what is stored for a weight, against transformers' own quantization."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models.quantized_formats import CASES

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.fp8 import BlockFP8, parse


@pytest.mark.parametrize("block", [(16, 16), (128, 64), None])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_it_quantizes_as_transformers_does(block: tuple[int, int] | None, power_of_two: bool) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    if power_of_two and block is None:
        pytest.skip("a scale per weight is a float")
    torch.manual_seed(0)
    weight = torch.randn(128, 192)
    weight[:16, :64] = 0
    config = SimpleNamespace(weight_block_size=block, scale_fmt="ue8m0" if power_of_two else "float")
    expected = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": weight})
    found = BlockFP8(block, power_of_two).quantize(weight)
    assert torch.equal(found[".weight"].view(torch.uint8), expected["a.weight"].view(torch.uint8))
    assert torch.equal(found[".weight_scale_inv"].flatten().float(), expected["a.weight_scale_inv"].flatten().float())


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("fp8")])
def test_sizes_that_do_not_divide(case: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(37, 45)
    tensors = CASES[case].format.quantize(weight)
    found = CASES[case].dequantize(tensors, (37, 45))
    assert float((found - weight).abs().max()) < 0.07 * float(weight.abs().max())
    for suffix, tensor in CASES[case].format.tensors((37, 45)).items():
        if suffix in tensors:
            assert tensor.shape in (None, tuple(tensors[suffix].shape)) and tensors[suffix].dtype in tensor.dtypes


def test_values_of_configurations() -> None:
    assert parse({}).formats == [BlockFP8((128, 128))]
    assert parse({"weight_block_size": [64, 32], "scale_fmt": "ue8m0"}).formats == [BlockFP8((64, 32), True)]
    assert parse({"weight_block_size": None, "activation_scheme": "static"}).formats == [BlockFP8(None, static=True)]
    for bad in ({"weight_block_size": [1]}, {"weight_block_size": "x"}, {"fmt": "e3m4"}):
        with pytest.raises(CheckpointError, match="quantization_config"):
            parse(bad)
