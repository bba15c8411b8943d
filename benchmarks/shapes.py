"""The measured models: real shapes, random weights, small enough for two CPU cores."""

from __future__ import annotations

from typing import Any


def config(name: str) -> Any:
    """The configuration of a shape: ``llama``, ``gpt2`` or ``mixtral``, about 200 million parameters each."""
    from transformers import GPT2Config, LlamaConfig, MixtralConfig

    if name == "llama":
        return LlamaConfig(
            hidden_size=1024,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=8,
            intermediate_size=2816,
            vocab_size=32000,
        )
    if name == "gpt2":
        return GPT2Config(n_embd=1024, n_layer=12, n_head=16, vocab_size=32000)
    if name == "mixtral":
        return MixtralConfig(
            hidden_size=768,
            num_hidden_layers=8,
            num_attention_heads=12,
            num_key_value_heads=4,
            intermediate_size=1344,
            num_local_experts=8,
            vocab_size=32000,
        )
    raise ValueError(f"no shape called {name}")


def save(name: str, folder: str) -> None:
    """Save a checkpoint of the shape with weights from a fixed seed."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(name)).save_pretrained(folder)
