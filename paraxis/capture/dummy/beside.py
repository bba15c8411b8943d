"""Arguments beside the token ids and the tensors of a modality: one small function for each name.

Those of ``ALWAYS`` are passed to a model that has them: without them parts of it would not run. The others are passed
if they are required.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .facts import Facts

Inputs = dict[str, Any]
Make = Callable[[Facts, Inputs, dict[str, torch.Tensor]], "torch.Tensor | None"]
"""From what is known, the inputs so far, and by modality where the placeholder tokens are."""

KINDS = {"image": 1, "video": 2, "audio": 3}
"""The numbers of modalities in ``mm_token_type_ids``."""


def kinds_of_tokens(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The modality of every token."""
    if not places:
        return None
    kinds = torch.zeros_like(inputs["input_ids"])
    for modality, mask in places.items():
        kinds[mask] = KINDS[modality]
    return kinds


def image_tokens(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """1 for tokens of an image, 0 for text: only of models in which images are tokens."""
    return places["image"].long() if "image" in places else None


def ones_like_ids(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """A mask without padding."""
    ids = inputs.get("input_ids")
    if isinstance(ids, torch.Tensor):
        return torch.ones_like(ids)
    features = next((inputs[n] for n in ("input_values", "input_features") if n in inputs), None)
    return None if features is None else facts.ints(facts.batch, features.shape[-1])


def images_seen(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """(rows, tokens, images of a row): every token sees every image."""
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.dim() < 5 or "input_ids" not in inputs:
        return None
    return facts.ints(*inputs["input_ids"].shape, pixels.shape[1])


def tiles_seen(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """(rows, tokens, images of a row, tiles): every token sees every tile."""
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.dim() < 6 or "input_ids" not in inputs:
        return None
    return facts.ints(*inputs["input_ids"].shape, *pixels.shape[1:3])


def image_positions(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """True for tokens that stand for a latent of an image, of which there is a fixed number."""
    if not inputs.keys() & {"pixel_values", "flattened_patches"}:
        return None
    latents = int(facts.vision("latent_query_num", default=1))
    rows, length = inputs["input_ids"].shape
    mask = torch.zeros(rows, max(length, latents + 2), dtype=torch.int64, device=facts.device)
    mask[:, 1 : latents + 1] = 1
    if mask.shape[1] > length:
        inputs["input_ids"] = facts.ints(*mask.shape)
    return mask


def boxes(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """(rows, tokens, corners): where a token is on the page."""
    ids = inputs.get("input_ids")
    if ids is None:
        return None
    return torch.tensor([1, 1, 2, 2], device=facts.device).expand(*ids.shape, 4).contiguous()


def points(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, objects, points, coordinates)"""
    return facts.floats(facts.batch, 2, 3, 2).float() * 8


def point_labels(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, objects, points): foreground and background."""
    labels = facts.ints(facts.batch, 2, 3)
    labels[..., 0] = 0
    return labels


def object_boxes(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, objects, corners)"""
    return facts.floats(facts.batch, 2, 4).float() * 8


def speaker(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, size): who speaks."""
    return facts.floats(facts.batch, int(facts.audio("speaker_embedding_dim", default=512)))


def decoder_spectrogram(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, time, frequencies): speech so far."""
    reduction = int(facts.audio("reduction_factor", default=1))
    return facts.floats(facts.batch, 12 * reduction, int(facts.audio("num_mel_bins", default=80)))


def visual_features(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, regions, size): features of regions of an image."""
    return facts.floats(facts.batch, 3, int(facts.vision("visual_feat_dim", "visual_embedding_dim", default=512)))


def visual_positions(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, regions, corners)"""
    return facts.floats(facts.batch, 3, int(facts.vision("visual_pos_dim", default=4)))


def masked_patches(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, patches): the first half is masked."""
    height, width = (n // facts.patch for n in facts.image_size)
    frames = facts.frames // facts.temporal if facts.temporal > 1 else 1
    mask = torch.zeros(facts.batch, frames * height * width, dtype=torch.bool, device=facts.device)
    mask[:, : mask.shape[1] // 2] = True
    return mask


def more_token_ids(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, tokens): text of another part of the model."""
    return facts.ints(facts.batch, min(facts.length, 8))


def pixels_seen(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, height, width): no padding."""
    return facts.ints(facts.batch, *facts.image_size)


def more_pixels(facts: Facts, inputs: Inputs, name: str) -> torch.Tensor | None:
    """Images of another part of the model, beside others: of the size that the part named like the argument has."""
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.dim() != 4:
        return None
    part = name.removesuffix("_pixel_values")
    own = [config for path, config in facts.configs if part in path]
    size = next((s for config in own if isinstance(s := getattr(config, "image_size", None), int)), None)
    return facts.floats(*pixels.shape[:2], *((size, size) if size else pixels.shape[2:]))


def task(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, tokens): the task as text."""
    return facts.ints(facts.batch, int(facts.text("task_seq_len", default=8)))


ALWAYS: dict[str, Make] = {
    "mm_token_type_ids": kinds_of_tokens,
    "token_type_ids": image_tokens,
    "image_attention_mask": images_seen,
    "cross_attention_mask": tiles_seen,
    "image_embeds_position_mask": image_positions,
    "bbox": boxes,
    "input_points": points,
    "input_labels": point_labels,
    "input_boxes": object_boxes,
    "visual_feats": visual_features,
    "visual_pos": visual_positions,
    "visual_embeds": visual_features,
    "task_inputs": task,
}
REQUIRED: dict[str, Make] = {
    "attention_mask": ones_like_ids,
    "decoder_input_values": decoder_spectrogram,
    "speaker_embeddings": speaker,
    "bool_masked_pos": masked_patches,
    "pixel_mask": pixels_seen,
}
"""By name. ``*_input_ids`` of a name that is not here are :func:`more_token_ids`."""


def missing_ones(facts: Facts, inputs: Inputs) -> list[str]:
    """The required arguments that nothing above gives."""
    return [name for name in facts.required if name not in inputs]


def add_beside(facts: Facts, inputs: Inputs, places: dict[str, torch.Tensor], optional: tuple[str, ...]) -> None:
    """Add to the inputs what the model has of these arguments; ``optional`` ones of ``REQUIRED`` too."""
    for name in facts.arguments:
        if name in inputs:
            continue
        make = ALWAYS.get(name)
        if make is None and (name in facts.required or name in optional):
            make = REQUIRED.get(name) or (more_token_ids if name.endswith("_input_ids") else None)
        value = make(facts, inputs, places) if make is not None else None
        if name.endswith("_pixel_values"):
            value = more_pixels(facts, inputs, name)
        if value is not None:
            inputs[name] = value
