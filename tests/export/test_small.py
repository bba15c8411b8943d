"""Small models with the code of large ones."""

from __future__ import annotations

from typing import Any

import pytest
from export.models import ATTENTION, MLP, llama
from torch import nn
from transformers import GPT2Config, LlamaForCausalLM

from paraxis.export.check import Check
from paraxis.export.small import NoSmallModel, narrowed, small_model


def test_heads_and_remainders_stay() -> None:
    large = llama(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=6, num_attention_heads=64, vocab_size=128258
    )
    checks: list[Check] = []

    def problem_of(model: nn.Module) -> str:
        checks[:] = [Check(model, 4)]
        return ""

    with small_model(large, LlamaForCausalLM, 4, problem_of) as model:
        config: Any = model.config
        assert (config.num_attention_heads, config.num_key_value_heads) == (64, 2)
        assert config.vocab_size % 4 == 128258 % 4 and sum(p.numel() for p in model.parameters()) < 40e6
        assert not checks[0](ATTENTION).exact and checks[0](MLP).exact


def test_no_small_model_can_be_used() -> None:
    refused = small_model(llama(), LlamaForCausalLM, 4, lambda model: "not this one")
    with pytest.raises(NoSmallModel, match="not this one"), refused:
        pass


def test_narrowed_configurations() -> None:
    data = GPT2Config(n_embd=768, n_head=12, n_layer=12, vocab_size=50257).to_dict()
    small = narrowed(data, 8, 2)
    assert (small["n_embd"], small["n_head"], small["n_layer"]) == (96, 12, 12)
    assert small["vocab_size"] % 2 == 1 and small["eos_token_id"] < small["vocab_size"] < 5000
