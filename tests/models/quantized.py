"""Tiny quantized checkpoints: any transformers model, quantized by a format itself, and what it must compute.

The reference is independent of what is tested: weights are dequantized by index arithmetic in float64, and a plain
transformers model computes with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paraxis.weights.quantized.format import Format

TEXT = {"vocab_size": 120, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1}
DENSE = {
    **TEXT,
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""Sizes that two and four ranks, blocks of 16 and groups of 32 do not divide evenly."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 4, "norm_topk_prob": True}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", DENSE),
    "packed": ("phi3", DENSE),
    "gqa": ("qwen2", {**DENSE, "num_key_value_heads": 1}),
    "moe": ("qwen3_moe", {**DENSE, "head_dim": 16, **EXPERTS}),
    "mla": (
        "deepseek_v3",
        {
            **DENSE,
            "num_key_value_heads": 6,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "experts": (
        "gpt_oss",
        {
            **DENSE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 160,
            "head_dim": 16,
            "num_attention_heads": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "encoder": (
        "bert",
        {**{k: v for k, v in DENSE.items() if not k.startswith("num_key")}, "is_decoder": False},
    ),
}
"""What is tested: the type of the model, and its configuration."""


def build(kind: str, **overrides: Any) -> Any:
    """A tiny model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    model_type, fields = ARCHITECTURES.get(kind) or (kind, DENSE)
    config = AutoConfig.for_model(model_type, **{**fields, **overrides})
    torch.manual_seed(0)
    cls = AutoModelForMaskedLM if kind == "encoder" else AutoModelForCausalLM
    return cls.from_config(config, dtype=torch.float32).eval()


def is_quantizable(model: nn.Module, key: str) -> bool:
    """Whether a tensor of a checkpoint is the weight of a linear layer, or of an expert, inside of the model."""
    if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return True
    if not key.endswith(".weight") or "lm_head" in key or "predictions.decoder" in key:
        return False
    if ".experts." in key:
        return True
    name = key.removesuffix(".weight")
    modules = dict(model.named_modules())
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    module = modules.get(name) or modules.get(prefix + name)
    return isinstance(module, nn.Linear)


def write(
    kind: str | nn.Module,
    folder: Path,
    format: Format,
    config: Mapping[str, Any],
    dequantize: Callable[[Mapping[str, torch.Tensor], tuple[int, ...]], torch.Tensor],
    dtype: torch.dtype = torch.float32,
    quantizable: Callable[[nn.Module, str], bool] = is_quantizable,
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **overrides: Any,
) -> Any:
    """Write a quantized checkpoint; the model that computes with the dequantized weights.

    Args:
        kind: The architecture, or a model.
        folder: Where to write it.
        format: What quantizes each weight.
        config: The ``quantization_config``.
        dequantize: From the tensors of a weight, by suffix, and its shape to the weight: the reference.
        dtype: The dtype of the model.
        quantizable: Which tensors of the plain checkpoint are quantized.
        inputs: What inputs of quantized linear layers are rounded to: the reference.
        overrides: Fields of the configuration.
    """
    model: Any = build(kind, **overrides) if isinstance(kind, str) else kind
    model.to(dtype)
    plain = folder / "plain"
    model.save_pretrained(plain)
    model.save_pretrained(folder / "original")
    state = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    quantized: list[str] = []
    for key, value in state.items():
        base = key.removesuffix(format.weight) if format.weight else key
        stack = value.dim() == 3 or ".experts." in key
        fits = key.endswith(format.weight) and (format.stacks if stack else format.linears)
        if not fits or not quantizable(model, key):
            stored[key] = value
            continue
        quantized.append(key)
        tensors = format.quantize(value.transpose(-1, -2) if format.transposed else value)
        stored |= {base + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}
        state[key] = dequantize(tensors, tuple(value.shape)).to(dtype).contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(state, plain / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "quantization_config": dict(config)}))
    reference = type(model).from_pretrained(plain, dtype=dtype).eval()
    for key in quantized if inputs is not None else ():
        module = {name: m for name, m in reference.named_modules()}.get(key.removesuffix(".weight"))
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: (inputs(args[0]),))
    return reference


def of_blocks(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The scale of every element times its value, in float64."""
    *_, rows, columns = values.shape
    r, c = torch.arange(rows) // block[0], torch.arange(columns) // block[1]
    return values.double() * scales.double()[..., r, :][..., c]
