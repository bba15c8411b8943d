"""Which calls of ``generate`` the generation loop does, and what it takes from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generating import tokenizer_of_words
from models.tiny import build

from paraxis.compat.generation import install_sampling_loop
from paraxis.runtime.generation.request import Request, is_supported, request_of

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", num_hidden_layers=1)


def requested(model: Any, inputs: Any = IDS, **options: Any) -> Request | None:
    """What a call of ``generate`` asks for."""
    found: list[Request | None] = []

    def loop(
        model: Any,
        plain: Any,
        ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **rest: Any,
    ) -> Any:
        synced, streamer = rest.pop("synced_gpus", False), rest.pop("streamer", None)
        found.append(
            request_of(model, ids, logits_processor, stopping_criteria, generation_config, synced, streamer, rest)
        )
        return ids

    install_sampling_loop(model, loop)
    model.generate(inputs, max_new_tokens=4, **options)
    return found[0] if found else None


def test_a_tokenizer_serves_the_stop_strings_alone(model: Any) -> None:
    request = requested(model, stop_strings=["w5 w6"], tokenizer=tokenizer_of_words(model.config.vocab_size))
    assert request is not None and len(request.stop_strings) == 1
    assert "tokenizer" not in request.inputs


def test_what_a_request_takes_from_the_arguments(model: Any) -> None:
    request = requested(
        model,
        attention_mask=MASK,
        do_sample=True,
        top_k=5,
        temperature=0.5,
        eos_token_id=[2, 3],
        pad_token_id=0,
        max_time=5.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert request is not None
    assert request.max_length == 7 and request.prompt_length == 3 and len(request.time_criteria) == 1
    assert request.sample and request.returns_fields and request.scores and not request.logits
    assert request.stop_tokens is not None and request.stop_tokens.tolist() == [2, 3]
    assert request.pad_token is not None and request.pad_token == 0
    assert [type(each).__name__ for each in request.processors] == ["TemperatureLogitsWarper", "TopKLogitsWarper"]
    assert request.inputs["attention_mask"] is not None and request.cache.get_seq_length() == 0


def test_a_mask_that_hides_nothing_is_left_out(model: Any) -> None:
    request = requested(model, attention_mask=torch.ones_like(IDS), eos_token_id=None)
    assert request is not None and request.inputs["attention_mask"] is None
    assert request.stop_tokens is None and request.pad_token is None


def test_scores_are_returned_in_fields_only(model: Any) -> None:
    request = requested(model, output_scores=True)
    assert request is not None and not request.scores and not request.returns_fields


class Stops:
    """A criterion of the user."""

    def __call__(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.ones(len(ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"use_cache": False},
        {"prefill_chunk_size": 2},
        {"num_beams": 2},
        {"synced_gpus": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"output_attentions": True, "return_dict_in_generate": True},
        {"stopping_criteria": [Stops()]},
        {"logits_processor": [lambda ids, scores: scores]},
        {"guidance_scale": 2.0},
        {"prefix_allowed_tokens_fn": lambda row, ids: [4, 5]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_calls_are_left_to_transformers(model: Any, options: dict[str, Any]) -> None:
    assert requested(model, **options) is None


def test_a_cache_of_the_user_is_left_to_transformers(model: Any) -> None:
    from transformers import DynamicCache, StaticCache

    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20)):
        assert requested(model, past_key_values=cache) is None


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("llama", {}, True),
        ("gemma2", {}, True),
        ("gpt2", {}, True),
        ("mixtral", {}, True),
        ("phi3", {}, False),  # prepares the inputs of a step in its own way
        ("llama", {"attn_implementation": "flex_attention"}, False),
    ],
)
def test_decoders_with_one_cache_per_layer_are_supported(name: str, overrides: dict[str, Any], expected: bool) -> None:
    assert is_supported(build(name, num_hidden_layers=1, **overrides)) is expected


def test_models_without_a_kv_cache_per_layer() -> None:
    from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

    t5 = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    assert not is_supported(T5ForConditionalGeneration(t5))
    assert not is_supported(MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32)))
    assert not is_supported(torch.nn.Linear(2, 2))


def test_a_part_of_the_loop_that_somebody_replaced_is_honoured(model: Any) -> None:
    assert is_supported(model)
    model.prepare_inputs_for_generation = lambda *args, **kwargs: {}
    try:
        assert not is_supported(model)
    finally:
        del model.prepare_inputs_for_generation
