"""Models and styles that the tests of exports share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig

from paraxis.export.check import Check

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ATTENTION = {f"model.layers.*.self_attn.{x}_proj": "column" for x in "qkv"} | {"model.layers.*.self_attn.o_proj": "row"}
MLP = {f"model.layers.*.mlp.{x}_proj": "column" for x in ("gate", "up")} | {"model.layers.*.mlp.down_proj": "row"}
ENDS = {"model.embed_tokens": "vocab", "lm_head": "column-gathered"}


def llama(**sizes: Any) -> LlamaConfig:
    """The configuration of a tiny Llama."""
    return LlamaConfig(**{**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, **sizes})


def check(config: Any, world: int = 2) -> Check:
    """A check of the model of a configuration, with random weights, norms and biases included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            else:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return Check(model, world)
