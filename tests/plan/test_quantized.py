"""Quantized checkpoints: the plan says that its figures are for unquantized weights, and what is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from paraxis import plan_model
from paraxis.plan.quantized import quantization_of

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, None),
        (FP8, ("fp8", 8)),
        ({"quant_method": "gptq", "bits": 4}, ("gptq", 4)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes", 4)),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
         ("compressed-tensors", 8)),
        ({"quant_method": "new"}, ("new", None)),
    ],
)  # fmt: skip
def test_bits_of_known_formats(data: Any, expected: Any) -> None:
    assert quantization_of(SimpleNamespace(quantization_config=data)) == expected


@pytest.mark.parametrize("skipped", [None, ["lm_head", "model.layers.0.mlp"]])
def test_the_memory_of_a_quantized_checkpoint(skipped: list[str] | None) -> None:
    """A byte per weight of linear layers, two for the rest; what the list names is not quantized."""
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, vocab_size=256,
        dtype="bfloat16",
    )  # fmt: skip
    plain = plan_model(config, 2).memory
    config.quantization_config = FP8 if skipped is None else {**FP8, "modules_to_not_convert": skipped}
    memory = plan_model(config, 2).memory
    assert plain is not None and memory is not None and plain.quantization == ""
    assert memory.parameters == plain.parameters
    attention, mlp = 4 * 64 * 64 // 2, 3 * 64 * 128 // 2
    stored = plain.parameters - attention - (mlp if skipped is None else 0)
    assert f"fp8, 8 bits per weight of linear layers: parameters of about {stored / 1e3:.3g} kB" in str(memory)
    assert "these figures are for weights in bfloat16" in str(memory)
