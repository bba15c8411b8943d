"""Example inputs to plan a model with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BATCH, LENGTH = 2, 8


def example_call(model: nn.Module, examples: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) to call the model with: those given, or made up for a model that takes token ids."""
    if examples is None:
        return (), _dummy(model, device)
    if isinstance(examples, dict):
        return (), _to(examples, device)
    if isinstance(examples, (tuple, list)):
        return tuple(_to(list(examples), device)), {}
    return (_to(examples, device),), {}


def _dummy(model: nn.Module, device: torch.device) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} is not a transformers model, so its inputs cannot be guessed: pass "
            "example_inputs=, a tensor, a tuple of positional or a dict of keyword arguments."
        )
    if getattr(model, "main_input_name", "input_ids") == "input_ids":
        rows = BATCH * (getattr(config, "num_codebooks", None) or 1)  # audio models take a row per codebook
        ids = torch.ones(rows, LENGTH, dtype=torch.int64, device=device)
        inputs = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        return inputs
    return _to(dict(model.dummy_inputs), device)  # type: ignore[arg-type,no-any-return]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, list):
        return [_to(v, device) for v in value]
    return value
