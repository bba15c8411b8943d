"""Checking example inputs: as many placeholder tokens as the model computes features for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .facts import Facts
from .scenes import placeholder
from .shapes import run_for_shapes

KINDS = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}


def check_placeholders(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise if the token ids of a call do not agree with its images, videos or audio.

    Raises:
        ValueError: says how many tokens there are, and how many features.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.is_meta or getattr(model, "config", None) is None:
        return
    if not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in inputs.values()):
        return
    try:
        _, features = run_for_shapes(model, inputs)
    except Exception as error:  # capturing the model shows what is wrong, if anything is
        features = getattr(error, "counts", {})
    facts = Facts(model, len(ids), ids.shape[-1], ids.device)
    for modality, count in features.items():
        token = placeholder(facts, modality) if modality in KINDS else None
        tokens = int((ids == token).sum()) if token is not None else count
        if tokens != count:
            raise ValueError(
                f"example_inputs do not agree: input_ids have {tokens} {modality} tokens (id {token}), and "
                f"{type(model).__name__} computes {count} features from {KINDS[modality]}: pass as many tokens, as the "
                "model's processor does."
            )
