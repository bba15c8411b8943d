"""Example inputs to plan a model with: the caller's, or dummy inputs for a model that takes token ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES: dict[str | None, tuple[int, int]] = {
    None: (2, 8),
    "prefill": (1, 2048),
    "decode": (1, 2),  # not 1, which a compiler specializes on; the cost of a call is the same
    "training": (1, 2048),
}
"""Batch size and sequence length of dummy inputs, by the objective of the plan."""


def example_call(
    model: nn.Module, examples: Any, device: torch.device, objective: str | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) to call the model with: the caller's examples, or dummy inputs where there are none."""
    if examples is None:
        return (), _dummy(model, device, objective)
    if isinstance(examples, dict):
        return (), _to(examples, device)
    if isinstance(examples, (tuple, list)):
        return tuple(_to(list(examples), device)), {}
    return (_to(examples, device),), {}


def _dummy(model: nn.Module, device: torch.device, objective: str | None) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} is not a transformers model, so its inputs cannot be guessed: pass "
            "example_inputs=, a tensor, a tuple of positional or a dict of keyword arguments."
        )
    if getattr(model, "main_input_name", "input_ids") == "input_ids":
        batch, length = SIZES[objective]
        rows = batch * (getattr(config, "num_codebooks", None) or 1)  # audio models take a row per codebook
        longest = getattr(config, "max_position_embeddings", None) or 0  # negative: no limit
        ids = torch.ones(rows, min(length, longest) if longest > 0 else length, dtype=torch.int64, device=device)
        inputs = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        return inputs
    return _to(dict(model.dummy_inputs), device)  # type: ignore[arg-type,no-any-return]


def takes_token_labels(model: nn.Module) -> bool:
    """Whether the labels of a model are tokens, one for each token of the input."""
    from transformers.models.auto import modeling_auto as auto

    causal = {
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(),
    }
    return type(model).__name__ in causal


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, list):
        return [_to(v, device) for v in value]
    return value
