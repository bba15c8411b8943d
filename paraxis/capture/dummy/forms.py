"""How models take images, videos and audio: one function for each form that transformers has, told by argument names.

A form gives all arguments of its modality at once, so that they agree: the patches of an image and their grid. Those
that a model's forward does not have are dropped. Forms whose ``marks`` are all arguments of the model come first; the
first one with which the model runs is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .facts import Facts

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """One way to take a modality: its arguments, and the names of arguments that are a mark of it."""

    make: Callable[[Facts], Inputs]
    marks: tuple[str, ...] = ()


# -- images --------------------------------------------------------------------------------------------------------


def batched_images(facts: Facts) -> Inputs:
    """(images, channels, height, width)"""
    return {"pixel_values": facts.floats(facts.batch, facts.channels, *facts.image_size)}


def large_images(facts: Facts) -> Inputs:
    """(images, channels, height, width), four times the configured size: for models that take images as crops."""
    height, width = facts.image_size
    return {"pixel_values": facts.floats(facts.batch, facts.channels, 4 * height, 4 * width)}


def small_images(facts: Facts) -> Inputs:
    """(images, channels, height, width) of any size, and the sizes: for models that take images as they come."""
    height, width = 3 * facts.patch * facts.merge, 2 * facts.patch * facts.merge
    pixels = facts.floats(facts.batch, facts.channels, height, width)
    return {"pixel_values": pixels, "image_sizes": _rows(facts, [height, width])}


def sized_images(facts: Facts) -> Inputs:
    """(images, channels, height, width) of the configured size, and the sizes."""
    return {**batched_images(facts), "image_sizes": _rows(facts, list(facts.image_size))}


def image_grids(facts: Facts) -> Inputs:
    """All patches of all images in one dimension, and per image how many there are: (frames, height, width)."""
    grid = [1, *_grid(facts)]
    return {"pixel_values": _flat_patches(facts, grid), "image_grid_thw": _rows(facts, grid)}


def image_grids_unflattened(facts: Facts) -> Inputs:
    """The same with patches of three dimensions: (patches, channels, side, side)."""
    grid = [1, *_grid(facts)]
    pixels = facts.floats(facts.batch * prod(grid), facts.channels, facts.patch, facts.patch)
    return {"pixel_values": pixels, "image_grid_thw": _rows(facts, grid)}


def image_crops(facts: Facts) -> Inputs:
    """(images, crops, channels, height, width): an image of a high resolution as crops and a thumbnail."""
    size = facts.vision("image_grid_pinpoints", default=[[2 * n for n in facts.image_size]])[0]
    crops = 1 + prod(-(-n // tile) for n, tile in zip(size, facts.image_size, strict=True))
    pixels = facts.floats(facts.batch, crops, facts.channels, *facts.image_size)
    return {
        "pixel_values": pixels,
        "image_sizes": _rows(facts, list(size)),
        "batch_num_images": facts.ints(facts.batch),
    }


def images_per_row(facts: Facts) -> Inputs:
    """(rows, images of a row, channels, height, width), with the pixels that are no padding."""
    count, size = 2, facts.image_size
    mask = torch.ones(facts.batch, count, *size, dtype=torch.bool, device=facts.device)
    return {
        "pixel_values": facts.floats(facts.batch, count, facts.channels, *size),
        "pixel_attention_mask": mask,
        "image_sizes": facts.ints(facts.batch, count, 2, value=size[0]),
    }


def image_tiles(facts: Facts) -> Inputs:
    """(rows, images of a row, tiles, channels, height, width), and which of the supported aspect ratios each has."""
    tiles = facts.vision("max_num_tiles", default=4)
    mask = facts.ints(facts.batch, 1, tiles)
    return {
        "pixel_values": facts.floats(facts.batch, 1, tiles, facts.channels, *facts.image_size),
        "aspect_ratio_ids": facts.ints(facts.batch, 1),
        "aspect_ratio_mask": mask,
    }


def side_by_side(facts: Facts) -> Inputs:
    """(1, channels, side, patches times side): all patches in a row, and per image how many there are."""
    height, width = 2 * facts.merge, 4 * facts.merge
    pixels = facts.floats(1, facts.channels, facts.patch, facts.batch * height * width * facts.patch)
    return {"pixel_values": pixels, "target_sizes": _rows(facts, [height, width])}


def plain_patches(facts: Facts) -> Inputs:
    """(rows, patches, values of a patch)"""
    return {"pixel_values": facts.floats(facts.batch, 6, facts.channels * facts.patch**2)}


def patches_of_frames(facts: Facts) -> Inputs:
    """(patches, frames, side, side, channels)"""
    side = facts.patch
    return {"pixel_values": facts.floats(3 * facts.batch, facts.temporal, side, side, facts.channels)}


def packed_patches(facts: Facts) -> Inputs:
    """(rows, patches, values of a patch), with the height and width of each image in patches."""
    height, width = 3 * facts.merge, 2 * facts.merge
    count = int(facts.vision("num_patches", default=height * width))
    mask = facts.ints(facts.batch, count)
    mask[:, height * width :] = 0
    return {
        "pixel_values": facts.floats(facts.batch, count, facts.channels * facts.patch**2),
        "pixel_attention_mask": mask,
        "spatial_shapes": _rows(facts, [height, width]),
    }


def positioned_patches(facts: Facts) -> Inputs:
    """(images, patches, values of a patch), with the column and row of each patch."""
    kernel = int(facts.vision("pooling_kernel_size", default=1))
    height, width = 3 * kernel, 2 * kernel
    x = torch.arange(width, device=facts.device).repeat(height)
    y = torch.arange(height, device=facts.device).repeat_interleave(width)
    positions = torch.stack((x, y), -1)[None].repeat(facts.batch, 1, 1)
    pixels = facts.floats(facts.batch, height * width, facts.channels * facts.patch**2)
    return {"pixel_values": pixels, "image_position_ids": positions, "pixel_position_ids": positions}


def flattened_patches(facts: Facts) -> Inputs:
    """(rows, patches, row and column and values of a patch)."""
    height, width = 3, 2
    values = int(facts.vision("patch_embed_hidden_size", default=facts.channels * facts.patch**2))
    patches = facts.floats(facts.batch, height * width, 2 + values)
    patches[..., 0] = torch.arange(1, height + 1, device=facts.device).repeat_interleave(width).to(patches.dtype)
    patches[..., 1] = torch.arange(1, width + 1, device=facts.device).repeat(height).to(patches.dtype)
    return {"flattened_patches": patches}


def video_as_images(facts: Facts) -> Inputs:
    """(rows, frames, channels, height, width)"""
    return {"pixel_values": facts.floats(facts.batch, facts.frames, facts.channels, *facts.image_size)}


# -- videos --------------------------------------------------------------------------------------------------------


def batched_videos(facts: Facts) -> Inputs:
    """(videos, frames, channels, height, width)"""
    return {"pixel_values_videos": facts.floats(facts.batch, facts.frames, facts.channels, *facts.image_size)}


def video_grids(facts: Facts) -> Inputs:
    """All patches of all videos in one dimension, and per video how many there are: (frames, height, width)."""
    grid = [2, *_grid(facts)]
    return {
        "pixel_values_videos": _flat_patches(facts, grid),
        "video_grid_thw": _rows(facts, grid),
        "second_per_grid_ts": torch.ones(facts.batch, device=facts.device),
        "video_second_per_grid": torch.ones(facts.batch, device=facts.device),
    }


def videos_side_by_side(facts: Facts) -> Inputs:
    """All patches of all frames in a row, and per frame how many there are."""
    made = side_by_side(facts)
    return {"pixel_values_videos": made["pixel_values"], "target_sizes_videos": made["target_sizes"]}


def short_video_grids(facts: Facts) -> Inputs:
    """The same with one step of time, for models that put text between the frames."""
    grid = [1, *_grid(facts)]
    return {
        **video_grids(facts),
        "pixel_values_videos": _flat_patches(facts, grid),
        "video_grid_thw": _rows(facts, grid),
    }


def frames_of_videos(facts: Facts) -> Inputs:
    """(frames of all videos, patches, values of a patch), their columns and rows, and the frames of each video."""
    images = positioned_patches(facts)
    return {
        "pixel_values_videos": images["pixel_values"],
        "video_position_ids": images["image_position_ids"],
        "num_frames_per_video": facts.ints(facts.batch),
    }


def positioned_videos(facts: Facts) -> Inputs:
    """(videos, frames, patches, values of a patch), with the column and row of each patch."""
    images = positioned_patches(facts)
    return {
        "pixel_values_videos": images["pixel_values"][:, None].repeat(1, 2, 1, 1),
        "video_position_ids": images["image_position_ids"][:, None].repeat(1, 2, 1, 1),
    }


# -- audio ---------------------------------------------------------------------------------------------------------


def spectrogram(facts: Facts) -> Inputs:
    """(rows, frequencies, time)"""
    return _features(facts, facts.floats(facts.batch, _bins(facts), _time(facts)), _time(facts))


def spectrogram_by_time(facts: Facts) -> Inputs:
    """(rows, time, frequencies)"""
    time = _short(facts)
    return _features(facts, facts.floats(facts.batch, time, _bins(facts)), time)


def wide_spectrogram_by_time(facts: Facts) -> Inputs:
    """(rows, time, frequencies) with 128 frequencies: what processors make where no configuration says how many"""
    time = _short(facts)
    return _features(facts, facts.floats(facts.batch, time, 128), time)


def short_spectrogram(facts: Facts) -> Inputs:
    """(rows, frequencies, time) of any length"""
    return _features(facts, facts.floats(facts.batch, _bins(facts), _short(facts)), _short(facts))


def spectrogram_image(facts: Facts) -> Inputs:
    """(rows, channels, time, frequencies): a spectrogram that is treated as an image"""
    size = int(facts.audio("spec_size", default=256))
    time = size * size // _bins(facts)
    fused = 4 if facts.audio("enable_fusion", default=False) else 1
    longer = torch.zeros(facts.batch, 1, dtype=torch.bool, device=facts.device)
    return {"input_features": facts.floats(facts.batch, fused, time, _bins(facts)), "is_longer": longer}


def waveform(facts: Facts) -> Inputs:
    """(rows, samples)"""
    return {"input_values": facts.floats(facts.batch, _samples(facts))}


def waveform_channels(facts: Facts) -> Inputs:
    """(rows, channels, samples)"""
    channels = int(facts.audio("audio_channels", "num_channels", default=1))
    return {"input_values": facts.floats(facts.batch, channels, _samples(facts))}


def values_by_time(facts: Facts) -> Inputs:
    """(rows, time, frequencies), under the name that waveforms have"""
    time = int(facts.audio("max_length", default=_short(facts)))
    return {"input_values": facts.floats(facts.batch, time if time > 20 else _short(facts), _bins(facts))}


FORMS: dict[str, list[Form]] = {
    "image": [
        Form(image_grids, ("pixel_values", "image_grid_thw")),
        Form(image_grids_unflattened, ("pixel_values", "image_grid_thw")),
        Form(image_tiles, ("pixel_values", "aspect_ratio_ids")),
        Form(packed_patches, ("pixel_values", "spatial_shapes")),
        Form(side_by_side, ("pixel_values", "target_sizes")),
        Form(positioned_patches, ("pixel_values", "image_position_ids")),
        Form(positioned_patches, ("pixel_values", "pixel_position_ids")),
        Form(flattened_patches, ("flattened_patches",)),
        Form(images_per_row, ("pixel_values", "pixel_attention_mask")),
        Form(images_per_row, ("pixel_values", "image_attention_mask")),
        Form(image_crops, ("pixel_values", "image_sizes")),
        Form(small_images, ("pixel_values", "image_sizes")),
        Form(batched_images, ("pixel_values",)),
        Form(image_crops, ("pixel_values",)),
        Form(images_per_row, ("pixel_values",)),
        Form(sized_images, ("pixel_values", "image_sizes")),
        Form(small_images, ("pixel_values",)),
        Form(video_as_images, ("pixel_values",)),
        Form(plain_patches, ("pixel_values",)),
        Form(patches_of_frames, ("pixel_values",)),
        Form(large_images, ("pixel_values",)),
    ],
    "video": [
        Form(video_grids, ("pixel_values_videos", "video_grid_thw")),
        Form(short_video_grids, ("pixel_values_videos", "video_grid_thw")),
        Form(videos_side_by_side, ("pixel_values_videos", "target_sizes_videos")),
        Form(frames_of_videos, ("pixel_values_videos", "num_frames_per_video")),
        Form(positioned_videos, ("pixel_values_videos", "video_position_ids")),
        Form(batched_videos, ("pixel_values_videos",)),
        Form(video_as_images, ("pixel_values",)),
    ],
    "audio": [
        Form(spectrogram_image, ("input_features", "is_longer")),
        Form(spectrogram, ("input_features",)),
        Form(short_spectrogram, ("input_features",)),
        Form(spectrogram_by_time, ("input_features",)),
        Form(wide_spectrogram_by_time, ("input_features",)),
        Form(waveform, ("input_values",)),
        Form(waveform_channels, ("input_values",)),
        Form(values_by_time, ("input_values",)),
    ],
}
"""By modality, the ways to take it, in the order in which they are tried."""

OTHER_NAMES = {
    "pixel_values": ("image_pixel_values", "images", "image"),
    "input_features": ("audio_input_features", "mel_spectrogram"),
    "input_features_mask": ("feature_attention_mask", "audio_attention_mask"),
}
"""What single models call an argument."""


def forms_of(facts: Facts, modality: str) -> list[Form]:
    """The forms in which a model may take a modality; empty if it has no arguments for it."""
    frames = facts.modalities == ("video",)
    found = [form for form in FORMS[modality] if all(name_of(facts, mark) for mark in form.marks)]
    if modality == "video" and not frames:  # a model of images and videos has arguments of its own for videos
        found = [form for form in found if form.make is not video_as_images]
    if modality == "image" and frames:
        return []
    pinpoints = facts.vision("image_grid_pinpoints") is not None
    if modality == "image" and not pinpoints:
        found = [form for form in found if form.make is not image_crops]
    return found


def name_of(facts: Facts, argument: str) -> str | None:
    """What the model calls an argument; None if it has none of the kind."""
    names = (argument, *OTHER_NAMES.get(argument, ()))
    return next((name for name in names if name in facts.arguments), None)


def arguments_of(facts: Facts, form: Form) -> Inputs:
    """The arguments of a form that the model has, under its names."""
    made = form.make(facts)
    return {name: value for key, value in made.items() if (name := name_of(facts, key)) is not None}


# -- sizes ---------------------------------------------------------------------------------------------------------


def _rows(facts: Facts, row: list[int]) -> torch.Tensor:
    """One row per image."""
    return torch.tensor([row] * facts.batch, dtype=torch.int64, device=facts.device)


def _grid(facts: Facts) -> tuple[int, int]:
    """Height and width of an image in patches, where images may have any size."""
    unit = facts.merge * int(facts.vision("window_size", default=1) if facts.length > 1024 else 1)
    return 3 * unit, 2 * unit


def _flat_patches(facts: Facts, grid: list[int]) -> torch.Tensor:
    return facts.floats(facts.batch * prod(grid), facts.channels * facts.temporal * facts.patch**2)


def _bins(facts: Facts) -> int:
    """Frequencies of a spectrogram."""
    found = facts.audio(
        *(
            "num_chroma",
            "num_mel_bins",
            "n_mels",
            "mel_bins",
            "feature_size",
            "input_feat_size",
            "feature_projection_input_dim",
        ),
        *("input_feat_per_channel", "input_dim", "n_mel_channels"),
        default=80,
    )
    return int(found)


def _time(facts: Facts) -> int:
    """Time of a spectrogram: what fills the positions of the encoder, whose convolutions halve it."""
    positions = facts.audio("max_source_positions", default=0)
    return 2 * int(positions) if positions else _short(facts)


def _short(facts: Facts) -> int:
    """Time of a spectrogram of any length."""
    return 96


def _samples(facts: Facts) -> int:
    """Samples of a waveform: some tens of frames after the convolutions."""
    strides = facts.audio("conv_stride", "upsampling_ratios", "upsample_rates", "downsampling_ratios", default=[320])
    stride = prod(strides) if isinstance(strides, (list, tuple)) else int(strides)
    return 40 * stride + 80


def _features(facts: Facts, features: torch.Tensor, time: int) -> Inputs:
    return {"input_features": features, "input_features_mask": facts.ints(facts.batch, time)}
