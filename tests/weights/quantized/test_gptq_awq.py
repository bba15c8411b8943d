"""GPTQ and AWQ: configurations, and the index of groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.quantized_formats import CASES

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.gptq_awq import AWQ, GPTQ, parse_awq, parse_gptq


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("awq", "gptq"))])
def test_what_is_stored(case: str) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    format = CASES[case].format
    tensors = format.quantize(weight)
    found = CASES[case].dequantize(tensors, (40, 64))
    assert float((found - weight).abs().max()) < 0.2 * float(weight.abs().max())
    for suffix, tensor in format.tensors((40, 64)).items():
        assert tensor.shape == tuple(tensors[suffix].shape) and tensors[suffix].dtype in tensor.dtypes


def refined(index: torch.Tensor, **options: Any) -> Any:
    """The format of a weight with this index."""
    format = GPTQ(4, 16, **options)
    return format.refined({".g_idx": index}, lambda suffix, box: index[slice(*box[0][0])])  # type: ignore[index]


def test_the_index_of_groups() -> None:
    regular = (torch.arange(64) // 16).to(torch.int32)
    assert refined(regular, ordered=None).ordered is False and refined(regular).ordered is False
    assert refined(regular.flip(0), ordered=None).ordered is True
    with pytest.raises(CheckpointError, match="not in order, but quantization_config has desc_act=False"):
        refined(regular.flip(0))
    with pytest.raises(CheckpointError, match="g_idx has 9, and there are 4 groups of 16 inputs"):
        refined(regular.index_fill(0, torch.tensor([5]), 9), ordered=None)


def test_configurations_that_are_known_and_not() -> None:
    assert parse_gptq({"bits": 4, "group_size": 32}).formats == [GPTQ(4, 32, offset=1)]
    found = parse_gptq({"bits": 8, "group_size": -1, "desc_act": True, "checkpoint_format": "gptq_v2"})
    assert found.formats == [GPTQ(8, 0, ordered=None)] and found.keeps_ends
    dynamic = {"-:.*gate$": {}, r".*down_proj": {"bits": 8}}
    found = parse_gptq({"bits": 4, "group_size": 32, "dynamic": dynamic})
    assert found.format_of("mlp.gate") is None and found.format_of("mlp.down_proj") == GPTQ(8, 32, offset=1)
    assert found.format_of("mlp.up_proj") == GPTQ(4, 32, offset=1)
    chosen = parse_gptq({"bits": 4, "modules_in_block_to_quantize": [["self_attn.q_proj"]]})
    assert chosen.format_of("model.layers.0.self_attn.q_proj") and not chosen.format_of("model.layers.0.mlp.up_proj")
    assert parse_awq({"bits": 4, "group_size": 64, "version": "GEMM"}).formats == [AWQ(4, 64)]
    for bad in ({"bits": 3}, {"bits": 4, "group_size": 7}, {"checkpoint_format": "marlin"}):
        with pytest.raises(CheckpointError, match="quantization_config"):
            parse_gptq(bad)
    for bad in ({"bits": 8}, {"version": "gemv"}):
        with pytest.raises(CheckpointError, match="quantization_config"):
            parse_awq(bad)
