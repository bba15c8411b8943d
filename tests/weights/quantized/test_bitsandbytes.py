"""bitsandbytes: blocks of the flattened weight, and rows of int8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.quantized_formats import CASES

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.bitsandbytes import FlatBlocks, RowwiseInt8, parse
from paraxis.weights.quantized.parameters import from_plain

FLAT = [name for name in CASES if isinstance(CASES[name].format, FlatBlocks)]


@pytest.mark.parametrize("shape", [(20, 128), (10, 96), (6, 22)])
@pytest.mark.parametrize("case", FLAT)
def test_boxes_of_blocks_that_begin_inside_of_rows(case: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    tensors = CASES[case].format.quantize(weight)
    headers = {suffix: tensor.to("meta") for suffix, tensor in tensors.items()}

    def read(suffix: str, index: Any) -> torch.Tensor:
        found = tensors[suffix]
        for dim, ranges in enumerate(index or ()):
            found = torch.cat([found.narrow(dim, a, b - a) for a, b in ranges], dim)
        return found

    assert CASES[case].format.shape(headers, read) == shape
    format = CASES[case].format.refined(headers, read)
    assert isinstance(format, FlatBlocks) and format.block == 64 and bool(format.nested) == ("nested" in case)
    expected = CASES[case].dequantize(tensors, shape)
    assert float((expected - weight).abs().max()) < 0.2 * float(weight.abs().max())
    run = format.run(shape)
    rows, columns = ((1, 3), (4, 6)), ((run, 2 * run),)
    scales = format.load("scales", (rows, ((1, 2),)), read, shape)
    codes = format.load("codes", (rows, ((run // 2, run),)), read, shape)
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    found = torch.tensor(format.table)[pairs] * scales
    assert torch.allclose(found.double(), expected[[1, 2, 4, 5], run : 2 * run], atol=1e-6), columns


def test_a_state_that_cannot_be_read() -> None:
    format = FlatBlocks()
    tensors = format.quantize(torch.randn(4, 64))
    headers = {suffix: tensor.to("meta") for suffix, tensor in tensors.items()}
    with pytest.raises(ValueError, match="quant_state.bitsandbytes__nf4 cannot be read"):
        format.shape(headers, lambda suffix, index: torch.tensor([1, 2], dtype=torch.uint8))
    with pytest.raises(KeyError):
        format.shape({}, lambda suffix, index: tensors[suffix])


def test_rows_of_int8() -> None:
    weight = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    tensors = RowwiseInt8().quantize(weight)
    found = tensors[".weight"].float() * tensors[".SCB"].unsqueeze(-1) / 127
    assert float((found - weight).abs().max()) < 0.02
    with pytest.raises(CheckpointError, match="weight_format is 2"):
        RowwiseInt8().refined(tensors, lambda suffix, index: torch.tensor(2))


def test_configurations_that_are_known_and_not() -> None:
    assert parse({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}).formats == [FlatBlocks("nf4")]
    (format,) = parse({"load_in_8bit": True, "llm_int8_threshold": 5.0}).formats
    assert isinstance(format, RowwiseInt8) and format.inputs is not None and format.inputs.outliers == 5.0
    bad = [{}, {"load_in_4bit": True, "bnb_4bit_quant_type": "x"}]
    for data in [*bad, {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}]:
        with pytest.raises(CheckpointError, match="quantization_config"):
            parse(data)


def test_plain_checkpoints_get_no_quantized_scales() -> None:
    """Their offset is the mean of all scales of a weight, which no rank has."""
    nested = parse({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True})
    with pytest.raises(CheckpointError, match="bnb_4bit_use_double_quant=True needs"):
        from_plain(torch.nn.Linear(4, 4), nested, {}, [], lambda key: torch.empty(0))
    assert nested.formats[0].plain_problem({"bnb_4bit_use_double_quant": False}) is None
