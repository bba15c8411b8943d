"""What the configuration of a model says about quantization."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.registry import METHODS, config_data, method_of, quantization_of


class Options:
    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": "fp8", "weight_block_size": [32, 32]}


def test_where_it_is_found() -> None:
    assert config_data(SimpleNamespace()) is None and quantization_of(None) is None
    for config in (
        SimpleNamespace(quantization_config=Options()),
        SimpleNamespace(quantization_config=Options().to_dict()),
        SimpleNamespace(get_text_config=lambda: SimpleNamespace(quantization_config=Options())),
        SimpleNamespace(compression_config=Options().to_dict()),
    ):
        found = quantization_of(config)
        assert found is not None and found.method == "fp8" and found.data["weight_block_size"] == [32, 32]


def test_names_of_methods() -> None:
    assert method_of({"quant_method": "gptq"}) == "gptq" and method_of({"load_in_4bit": True}) == "bitsandbytes"
    assert method_of({}) == "unknown method" and "fp8" in METHODS


def test_unknown_methods_and_values() -> None:
    new = SimpleNamespace(quantization_config={"quant_method": "new"})
    assert quantization_of(new, known_only=True) is None
    with pytest.raises(CheckpointError, match="'new', which is not known; these are: "):
        quantization_of(new)
    with pytest.raises(CheckpointError, match="weight_block_size"):
        quantization_of(SimpleNamespace(quantization_config={"quant_method": "fp8", "weight_block_size": 3}))
