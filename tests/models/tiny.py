"""Tiny models of many architectures: random weights, fixed seed, saved as ordinary checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
GPT = {**COMMON, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**LLAMA, "tie_word_embeddings": False}),
    "llama-tied": ("llama", {**LLAMA, "tie_word_embeddings": True}),
    "mistral": ("mistral", LLAMA),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 8}),
    "gemma2": ("gemma2", {**LLAMA, "head_dim": 8, "sliding_window": 8}),
    "gpt2": ("gpt2", {**GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt_neox": ("gpt_neox", {**LLAMA, "num_key_value_heads": None}),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "opt": ("opt", {**LLAMA, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": ("bloom", {**COMMON, "hidden_size": 64, "n_layer": 2, "n_head": 8}),
    "phi3": ("phi3", LLAMA),
    "falcon": ("falcon", {**LLAMA, "multi_query": True}),
    "stablelm": ("stablelm", LLAMA),
    "olmo2": ("olmo2", LLAMA),
}
MOE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "mixtral",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False},
    ),
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {**COMMON, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}
PARALLEL_BLOCKS = {"gpt_neox", "gptj", "falcon"}
"""Attention and MLP in parallel: one all-reduce per layer covers both."""


def config(name: str, **overrides: Any) -> Any:
    """The configuration of a tiny model."""
    from transformers import AutoConfig

    model_type, fields = {**CONFIGS, **MOE, **RECURRENT}[name]
    fields = {key: value for key, value in {**fields, **overrides}.items() if value is not None}
    tiny = AutoConfig.for_model(model_type, **fields)
    if hasattr(tiny, "initializer_range"):
        tiny.initializer_range = 0.1  # logits that differ from one another
    return tiny


def build(name: str, **overrides: Any) -> Any:
    """A tiny model with random weights, norms and biases included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(name, **overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(name: str, folder: Path, **overrides: Any) -> str:
    """Save a tiny model with ``save_pretrained``; the folder."""
    build(name, **overrides).save_pretrained(folder)
    return str(folder)
