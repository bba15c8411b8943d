"""What configurations of compressed tensors say."""

from __future__ import annotations

from typing import Any

import pytest

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.activations import InputQuantization
from paraxis.weights.quantized.compressed_config import parse
from paraxis.weights.quantized.compressed_tensors import NaiveQuantized, PackedIntegers
from paraxis.weights.quantized.fp4 import PackedFP4

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def config(format: str | None, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    """A configuration with one group."""
    return {"format": format, "config_groups": {"g": {"targets": ["Linear"], "weights": weights, **group}}}


def test_formats_of_configurations() -> None:
    token = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    local = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    static = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    expected = [
        (config("pack-quantized", INT4), PackedIntegers(4, 32)),
        (config("pack-quantized", {**INT4, "actorder": "group"}), PackedIntegers(4, 32, ordered=True)),
        (config("pack-quantized", {**INT4, "actorder": "static"}), PackedIntegers(4, 32)),
        (config("mixed-precision", INT4), PackedIntegers(4, 32)),
        (
            config("float-quantized", FP8, input_activations=token),
            NaiveQuantized(True, (1, 0), inputs=InputQuantization()),
        ),
        (
            config("naive-quantized", {**FP8, "strategy": "block", "block_structure": "8x4"}),
            NaiveQuantized(True, (8, 4)),
        ),
        (
            config("int-quantized", {"num_bits": 8, "strategy": "tensor"}, input_activations=static),
            NaiveQuantized(False, (0, 0), inputs=InputQuantization(8, False, False, -1, False)),
        ),
        (
            config("nvfp4-pack-quantized", nvfp4, input_activations=local),
            PackedFP4(True, InputQuantization(4, True, True, 16, True, True)),
        ),
    ]
    for data, format in expected:
        assert parse(data).formats == [format]


def test_names_before_patterns_before_classes() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        "b": {"targets": ["re:.*self_attn.*"], "weights": FP8, "format": "float-quantized"},
    }
    found = parse({"format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head", "re:.*gate$"]})
    assert found.format_of("model.layers.0.self_attn.q_proj") == NaiveQuantized(True, (1, 0))
    assert found.format_of("model.layers.0.mlp.up_proj") == PackedIntegers(4, 32)
    assert found.format_of("lm_head") is None and found.format_of("model.layers.0.mlp.gate") is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({**config("pack-quantized", INT4), "quantization_status": "frozen"}, "quantization_status='frozen'"),
    ({**config("pack-quantized", INT4), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
    ({**config("pack-quantized", INT4), "transform_config": {"a": 1}}, "transform_config is not supported"),
    ({**config("pack-quantized", INT4), "sparsity_config": {"format": "sparse-24"}}, "format='sparse-24'"),
    (config("marlin-24", INT4), "format='marlin-24' is not supported; pack-quantized"),
    (config("pack-quantized", {**INT4, "num_bits": 3}), "num_bits=3"),
    (config("pack-quantized", {**INT4, "strategy": "tensor"}), "strategy='tensor' of pack-quantized"),
    (config("pack-quantized", {**INT4, "group_size": 7}), "group_size=7 is not a positive even number"),
    (config("float-quantized", {**FP8, "strategy": "block"}), "block_structure=None"),
    (config("float-quantized", {**FP8, "strategy": "new"}), "strategy='new' of weights"),
    (config("int-quantized", INT4), "num_bits=4 in int-quantized"),
    (config("nvfp4-pack-quantized", {"group_size": 32}), "group_size=32 of nvfp4-pack-quantized"),
    (config("float-quantized", FP8, input_activations={"num_bits": 4}), "input_activations with num_bits=4"),
    (config("float-quantized", FP8, input_activations={"strategy": "new"}), "strategy='new' of input_activations"),
    (config("float-quantized", FP8, output_activations={"num_bits": 8}), "output_activations"),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_what_is_not_supported(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match="quantization_config") as error:
        parse(data)
    assert message in str(error.value)
