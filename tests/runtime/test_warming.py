"""After ``warm_up`` nothing is compiled, for other lengths of prompts or a growing KV cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.compare import batch, parallel, reference
from torch import nn

import paraxis


def generate_after_warm_up(folder: str) -> tuple[int, int, list[int]]:
    """Compilations of the warm-up, compilations after two generations, and the tokens of the second."""
    model, ctx = parallel(folder)
    ids, _ = batch(model.config.vocab_size)
    assert paraxis.warm_up(model.eval(), batch_size=len(ids)) > 0
    warm = ctx.compile_times
    model.generate(torch.cat([ids] * 4, 1), max_new_tokens=3, do_sample=False)
    tokens = model.generate(ids, max_new_tokens=200, do_sample=False, eos_token_id=None)
    return warm, ctx.compile_times, tokens[:, ids.shape[1] :].tolist()


def test_nothing_is_compiled_after_warm_up(ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints("llama-tied", num_hidden_layers=1, max_position_embeddings=256)
    unsharded = reference(folder)
    ids, _ = batch(unsharded.config.vocab_size)
    tokens = unsharded.generate(ids, max_new_tokens=200, do_sample=False, eos_token_id=None)
    expected = tokens[:, ids.shape[1] :].tolist()
    for warm, later, found in ranks(2).run(generate_after_warm_up, folder):
        assert 0 < warm == later and found == expected


def test_too_few_tokens_and_models_without_generate_are_refused(checkpoints: Any) -> None:
    with pytest.raises(ValueError, match="at least 3"):
        paraxis.warm_up(reference(checkpoints("llama")), new_tokens=1)
    with pytest.raises(TypeError, match="Linear does not generate"):
        paraxis.warm_up(nn.Linear(2, 2))
