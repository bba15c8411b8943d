"""What is taken from transformers' continuous batching: results, stop tokens, and how scores are processed."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from models.tiny import build

from paraxis.compat.continuous_batching import (
    generation_output,
    is_stateful,
    new_batching_config,
    page_size_of,
    processors_of,
    stop_tokens_of,
)


def test_results_have_transformers_states() -> None:
    times = (1.0, 2.0, 3.0), None
    assert not generation_output("a", [1], [2], [], False, "", times).is_finished()
    assert generation_output("a", [1], [2], [], True, "", times).is_finished()
    failed = generation_output("a", [1], [2], [-0.5], True, "no memory", times)
    assert failed.is_finished() and failed.error == "no memory" and failed.lifespan == (2.0, 3.0)


def test_stop_tokens_are_those_of_the_first_value() -> None:
    assert stop_tokens_of(None, [3, 4], 5) == {3, 4}
    assert stop_tokens_of(-1, 5) == frozenset(), "none are wanted"
    assert stop_tokens_of(None) == frozenset()


def test_sizes_of_blocks_in_two_versions() -> None:
    assert page_size_of(new_batching_config()) > 0
    assert page_size_of(SimpleNamespace(page_size=16, block_size=None)) == 16
    assert page_size_of(SimpleNamespace(block_size=32)) == 32


def test_models_with_a_state_are_told() -> None:
    assert is_stateful(SimpleNamespace(_is_stateful=True)) and not is_stateful(SimpleNamespace())


def test_processors_are_those_of_generate() -> None:
    from transformers import GenerationConfig

    model, device = build("llama"), torch.device("cpu")
    assert processors_of(model, GenerationConfig(do_sample=False), [5, 6], device) is None
    drawn = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, min_new_tokens=2, eos_token_id=2)
    names = [type(each).__name__ for each in processors_of(model, drawn, [5, 6], device)]
    assert {"TemperatureLogitsWarper", "TopKLogitsWarper"} <= set(names)
    assert any(name.startswith("MinNewTokens") for name in names)
