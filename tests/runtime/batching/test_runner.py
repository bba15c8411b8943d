"""Which models can be batched, and how long their sequences may be."""

from __future__ import annotations

import pytest
from models.tiny import build, config

from paraxis.runtime.batching.runner import check_model, longest_sequence


def test_models_that_cannot_be_batched_are_named() -> None:
    check_model(build("llama"))
    check_model(build("gemma2"))
    with pytest.raises(NotImplementedError, match="MambaForCausalLM cannot be batched continuously"):
        check_model(build("mamba"))
    with pytest.raises(NotImplementedError, match=r"takes no position_ids|attention interface"):
        check_model(build("bloom"))


def test_longrope_is_used_below_the_length_at_which_it_changes() -> None:
    assert longest_sequence(config("llama")) == 64
    phi3 = config("phi3")
    phi3.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    assert longest_sequence(phi3) == 32
