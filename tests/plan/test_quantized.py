"""Quantized parameters in a plan: what they take, and what is said of methods that are not known."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from paraxis import plan_model
from paraxis.errors import CheckpointError

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def config(**quantization: Any) -> LlamaConfig:
    found = LlamaConfig(
        hidden_size=256, num_hidden_layers=1, num_attention_heads=4, intermediate_size=512, vocab_size=256,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    if quantization:
        found.quantization_config = quantization
    return found


@pytest.mark.parametrize("skipped", [None, ["lm_head", "model.layers.0.mlp"]])
def test_the_memory_of_a_quantized_checkpoint(skipped: list[str] | None) -> None:
    """A byte per weight of linear layers and four per block, two for the rest; what the list names is not quantized."""
    plain = plan_model(config(), 2).memory
    found = plan_model(config(**FP8, **({"modules_to_not_convert": skipped} if skipped else {})), 2).memory
    assert plain is not None and found is not None and plain.quantization == ""
    attention, mlp = 4 * 256 * 256, 3 * 256 * 512
    quantized = (attention + (0 if skipped else mlp)) // 2
    blocks = (4 * 4 + (0 if skipped else 3 * 8)) // 2
    assert found.parameters == plain.parameters - quantized + 4 * blocks
    assert f"{4 if skipped else 7} of 12 parameters are quantized (fp8, 8 bits per weight" in found.quantization


def test_unknown_methods_are_planned_as_they_are_built() -> None:
    plain, found = plan_model(config(), 2).memory, plan_model(config(quant_method="new"), 2).memory
    assert plain is not None and found is not None and found.parameters == plain.parameters
    assert found.quantization == (
        "the checkpoint is quantized (new), which Paraxis cannot read: these figures are for weights in bfloat16"
    )


@pytest.mark.parametrize(("wanted", "bits"), [("fp8", 8.0), ("int8", 8.125), ("int4", 4.125), ("nf4", 4.5), (FP8, 8.0)])
def test_the_memory_of_a_plain_checkpoint_that_is_quantized_while_it_is_loaded(wanted: Any, bits: float) -> None:
    plain = plan_model(config(), 2).memory
    found = plan_model(config(), 2, quantization_config=wanted).memory
    assert plain is not None and found is not None
    weights = (4 * 256 * 256 + 3 * 256 * 512) // 2
    assert abs(plain.parameters - found.parameters - weights * (2 - bits / 8)) < 0.02 * weights
    assert "7 of 12 parameters are quantized" in found.quantization


def test_what_cannot_be_quantized_while_it_is_loaded() -> None:
    with pytest.raises(CheckpointError, match="this one is quantized already .fp8.: leave it out"):
        plan_model(config(**FP8), 2, quantization_config="fp8")
    with pytest.raises(CheckpointError, match="quantization_config='fp9' is not known: fp8, int8, int4, nf4 are"):
        plan_model(config(), 2, quantization_config="fp9")
    with pytest.raises(TypeError, match="neither a dictionary nor a configuration"):
        plan_model(config(), 2, quantization_config=3)
