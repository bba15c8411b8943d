"""Example inputs to plan a model with: the caller's, or dummy inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .dummy.facts import Facts
from .dummy.forms import FORMS, forms_of
from .dummy.scenes import dummy_scenes, text_scene

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
    """(args, kwargs) to call the model with: the caller's examples, or dummy inputs where there are none.

    Of several scenes, it is the richest.
    """
    return next(example_calls(model, examples, device, objective))


def example_calls(
    model: nn.Module, examples: Any, device: torch.device, objective: str | None = None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(args, kwargs) of every scene to plan the model with. Later ones are for parameters that earlier ones do not use.

    Raises:
        ValueError: there are no examples, and dummy inputs cannot be derived.
    """
    if is_scenes(examples):
        for scene in examples:
            yield (), _to(scene, device)
    elif isinstance(examples, dict):
        yield (), _to(examples, device)
    elif isinstance(examples, (tuple, list)):
        yield tuple(_to(list(examples), device)), {}
    elif examples is not None:
        yield (_to(examples, device),), {}
    else:
        found = dummy_scenes(_facts(model, device, objective))
        if objective == "decode":  # a decode step has no images: the decoder is planned without them
            inputs = list(found)
            found = iter(inputs[-1:] + inputs[:-1])
        for scene in found:
            yield (), scene


def text_call(model: nn.Module, device: torch.device, objective: str | None = None) -> dict[str, Any]:
    """Dummy inputs with text alone, where a model takes it; else those of its richest scene."""
    facts = _facts(model, device, objective)
    return text_scene(facts, check=any(forms_of(facts, modality) for modality in FORMS)) or next(dummy_scenes(facts))


def is_scenes(examples: Any) -> bool:
    """Whether the examples are several calls: a list of dicts."""
    return isinstance(examples, (tuple, list)) and bool(examples) and all(isinstance(x, dict) for x in examples)


def _facts(model: nn.Module, device: torch.device, objective: str | None) -> Facts:
    if getattr(model, "config", None) is None:
        raise ValueError(
            f"{type(model).__name__} is not a transformers model, so its inputs cannot be guessed: pass "
            "example_inputs=, a tensor, a tuple of positional or a dict of keyword arguments."
        )
    return Facts(model, *SIZES[objective], device)


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
