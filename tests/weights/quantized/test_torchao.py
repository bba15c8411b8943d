"""torchao: configurations, and groups that are those of the scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.activations import InputQuantization
from paraxis.weights.quantized.torchao import TorchAO, parse


def of(kind: str, **data: Any) -> dict[str, Any]:
    """A configuration as transformers writes it."""
    return {"quant_type": {"default": {"_type": kind, "_data": data, "_version": 2}}}


def test_configurations_that_are_known_and_not() -> None:
    assert parse(of("Int8WeightOnlyConfig")).formats == parse(of("Float8WeightOnlyConfig")).formats == [TorchAO()]
    symmetric = {"_data": "SYMMETRIC", "_type": "MappingType"}
    found = parse(of("Int8DynamicActivationInt8WeightConfig", act_mapping_type=symmetric))
    assert found.formats == [TorchAO(inputs=InputQuantization(8, False, reciprocal=True))]
    rows = parse(of("Float8DynamicActivationFloat8WeightConfig", granularity=[{"_type": "PerRow"}]))
    assert rows.formats == [TorchAO(inputs=InputQuantization())]
    bad = [{}, of("Int4WeightOnlyConfig"), of("Int8DynamicActivationInt8WeightConfig", act_mapping_type="ASYMMETRIC")]
    for data in [*bad, {"quant_type": "int8"}, {**of("Int8WeightOnlyConfig"), "include_input_output_embeddings": True}]:
        with pytest.raises(CheckpointError, match="quantization_config of torchao"):
            parse(data)


@pytest.mark.parametrize(
    ("scales", "block"), [((8, 1), (1, 32)), ((8, 4), (1, 8)), ((1, 1), (8, 32)), ((8, 3), None), ((4, 1), None)]
)
def test_groups_are_those_of_the_scales(scales: tuple[int, int], block: tuple[int, int] | None) -> None:
    headers = {"._weight_qdata": torch.empty(8, 32, dtype=torch.int8), "._weight_scale": torch.empty(scales)}
    if block is None:
        with pytest.raises(CheckpointError, match="_weight_scale has shape"):
            TorchAO().refined(headers, lambda suffix, index: headers[suffix])
        return
    format = TorchAO().refined(headers, lambda suffix, index: headers[suffix])
    assert format.encoding((8, 32)).block == block and format.tensors((8, 32))["._weight_scale"].shape == scales
