"""Example inputs of a call: the caller's, or dummy inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture.dummy.tiny_multimodal import llava, on_meta
from torch import nn

from paraxis.capture.dummy_inputs import SIZES, example_call, example_calls, takes_token_labels, text_call


class Model(nn.Module):
    main_input_name = "input_ids"

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**fields)


@pytest.mark.parametrize(("longest", "length"), [(None, 8), (-1, 8), (0, 8), (5, 5), (1000, 8)])
def test_dummy_inputs_fit_the_position_embeddings(longest: int | None, length: int) -> None:
    """Some configurations say -1 for "no limit"."""
    _, inputs = example_call(Model(max_position_embeddings=longest), None, torch.device("cpu"))
    assert inputs["input_ids"].shape == (2, length)


def test_audio_models_get_a_row_per_codebook() -> None:
    _, inputs = example_call(Model(num_codebooks=4), None, torch.device("cpu"))
    assert inputs["input_ids"].shape == (8, 8)


def test_a_module_without_config_needs_examples() -> None:
    with pytest.raises(ValueError, match="pass example_inputs="):
        example_call(nn.Linear(2, 2), None, torch.device("cpu"))


@pytest.mark.parametrize("objective", ["prefill", "decode", "training"])
def test_the_objective_sets_batch_size_and_length(objective: str) -> None:
    _, inputs = example_call(Model(), None, torch.device("cpu"), objective)
    assert inputs["input_ids"].shape == SIZES[objective]


def test_encoder_decoder_models_get_inputs_for_both() -> None:
    _, inputs = example_call(Model(is_encoder_decoder=True), None, torch.device("cpu"))
    assert inputs.keys() == {"input_ids", "decoder_input_ids"}


def test_examples_of_the_caller_are_used() -> None:
    x, device = torch.ones(2), torch.device("meta")
    args, kwargs = example_call(Model(), x, device)
    assert [a.device for a in args] == [device] and not kwargs
    args, kwargs = example_call(Model(), (x, [x], 3), device)
    assert args[0].is_meta and args[1][0].is_meta and args[2] == 3 and not kwargs
    args, kwargs = example_call(Model(), {"x": x, "flag": True}, device)
    assert not args and kwargs["x"].is_meta and kwargs["flag"] is True


def test_a_list_of_dicts_is_several_calls() -> None:
    x, device = torch.ones(2), torch.device("cpu")
    assert [kwargs.keys() for _, kwargs in example_calls(Model(), [{"x": x}, {"y": x}], device)] == [{"x"}, {"y"}]
    ((args, kwargs),) = example_calls(Model(), [x, x], device)  # a list of tensors is one call
    assert len(args) == 2 and not kwargs


def test_decode_is_planned_with_text_first() -> None:
    device = torch.device("cpu")
    first, second = (kwargs for _, kwargs in example_calls(on_meta(llava), None, device, "decode"))
    assert first.keys() == {"input_ids"} == text_call(on_meta(llava), device).keys()
    assert "pixel_values" in second and "pixel_values" in example_call(on_meta(llava), None, device)[1]


def test_labels_of_language_models_are_tokens() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    config = LlamaConfig(**sizes)
    assert takes_token_labels(LlamaForCausalLM(config))
    assert not takes_token_labels(LlamaForSequenceClassification(config))
