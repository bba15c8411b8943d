"""What the tests of commands share."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the configuration of a tiny model, without weights."""
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=96,
    ).save_pretrained(path)
    return str(path)
