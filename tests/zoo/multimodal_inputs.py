"""Inputs of images, videos and audio for tiny models, written without the engine's help, of other sizes than its own.

A candidate is one way to pass a modality; the first one with which the unsharded model runs is used. There are as many
placeholder tokens as the unsharded model computes features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from zoo.multimodal_cases import TOKENS, nested

Inputs = dict[str, Any]

ROWS, TEXT = 1, 9
KINDS = {"image": 1, "video": 2, "audio": 3}
EDGES = TOKENS["vision_start"], TOKENS["vision_end"]


class NoInputs(ValueError):
    """No inputs with which the model runs."""


def inputs_of(model: Any) -> Inputs:
    """Random inputs of the model's modality."""
    arguments = inspect.signature(type(model).forward).parameters
    first: Exception | None = None
    for make in candidates(arguments):
        try:
            inputs = for_batch_norm(model, complete(model, arguments, make(Draw(model))))
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as error:  # another form
            first = first or error
    raise NoInputs(f"{type(first).__name__}: {(str(first).splitlines() or [''])[0]}") from first


def for_batch_norm(model: Any, inputs: Inputs) -> Inputs:
    """Two images where there is one and the model has batch norms.

    For a batch of one, torch's batch norm takes a gradient of permuted strides for one of another layout, on CPUs in
    eval mode, and the unsharded model's gradients are wrong (torch 2.13, compared with central differences).
    """
    norms = any(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in model.modules())
    if not norms or inputs.keys() != {"pixel_values"} or len(inputs["pixel_values"]) != 1:
        return inputs
    image = inputs["pixel_values"]
    return {"pixel_values": torch.cat((image, torch.randn(image.shape, generator=torch.Generator().manual_seed(8))))}


class Draw:
    """Random numbers, and what the configuration says of sizes."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.generator = torch.Generator().manual_seed(7)

    def floats(self, *shape: int) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(*shape, generator=self.generator)

    def ids(self, *shape: int) -> torch.Tensor:
        """Tokens of text."""
        low = min(200, self.field("vocab_size", 200))
        return torch.randint(3, min(low, 200), shape, generator=self.generator)

    def field(self, name: str, default: Any) -> Any:
        """A field of the configuration or of one inside of it, inner ones first."""
        for config in reversed(nested(self.model.config)):
            try:
                found = getattr(config, name, None)
            except Exception:  # it differs from layer to layer
                continue
            if found is not None:
                return found
        return default

    def number(self, name: str, default: int) -> int:
        """A field that is a number, or the last of a list of numbers."""
        found = self.field(name, default)
        return int(found[-1] if isinstance(found, (list, tuple)) else found)

    @property
    def configured(self) -> tuple[int, int]:
        """Height and width that the model is configured for."""
        size = self.field("image_size", 64)
        if isinstance(size, dict):
            return size["height"], size["width"]
        return (size[-2], size[-1]) if isinstance(size, (list, tuple)) else (size, size)

    @property
    def patch(self) -> int:
        """Side of a patch."""
        return self.number("patch_size", 8)

    @property
    def merge(self) -> int:
        """How many patches of a side become one token."""
        return self.number("spatial_merge_size", self.number("merge_size", 2))


# -- ways to pass images, videos and audio ---------------------------------------------------------------------------


def grids(draw: Draw) -> Inputs:
    """Two images of different sizes as one list of patches."""
    m = draw.merge
    grid = [[1, 2 * m, 4 * m], [1, 4 * m, 2 * m]]
    values = 3 * draw.number("temporal_patch_size", draw.number("patch_temporal", 1)) * draw.patch**2
    return {
        "pixel_values": draw.floats(sum(map(prod, grid)), values),
        "image_grid_thw": torch.tensor(grid),
        "image_merge_sizes": torch.tensor([m, m]),
    }


def grids_of_squares(draw: Draw) -> Inputs:
    """The same with patches of three dimensions."""
    inputs = grids(draw)
    count = len(inputs["pixel_values"])
    return {**inputs, "pixel_values": draw.floats(count, 3, draw.patch, draw.patch)}


def padded(draw: Draw) -> Inputs:
    """Two images of different sizes, padded to the larger one."""
    unit = draw.patch * draw.merge
    sizes = [[4 * unit, 2 * unit], [2 * unit, 4 * unit]]
    return {"pixel_values": draw.floats(2, 3, 4 * unit, 4 * unit), "image_sizes": torch.tensor(sizes)}


def crops(draw: Draw) -> Inputs:
    """An image of a high resolution in crops."""
    height, width = draw.configured
    size = draw.field("image_grid_pinpoints", [[2 * height, width]])[-1]
    count = 1 + (size[0] // height) * (size[1] // width)
    return {
        "pixel_values": draw.floats(ROWS, count, 3, height, width),
        "image_sizes": torch.tensor([[size[0] - 3, size[1]]]),
        "batch_num_images": torch.ones(ROWS, dtype=torch.int64),
    }


def tiles(draw: Draw) -> Inputs:
    """An image in tiles, one of which is padding."""
    count = draw.number("max_num_tiles", 4)
    mask = torch.ones(ROWS, 1, count, dtype=torch.int64)
    mask[..., -1] = 0
    return {
        "pixel_values": draw.floats(ROWS, 1, count, 3, *draw.configured),
        "aspect_ratio_ids": torch.full((ROWS, 1), 2),
        "aspect_ratio_mask": mask,
        "cross_attention_mask": mask[:, None].expand(ROWS, TEXT, 1, count).contiguous(),
    }


def several(draw: Draw) -> Inputs:
    """Three images of a row, with a mask of their pixels."""
    height, width = draw.configured
    return {
        "pixel_values": draw.floats(ROWS, 3, 3, height, width),
        "pixel_attention_mask": torch.ones(ROWS, 3, height, width, dtype=torch.bool),
        "image_attention_mask": torch.ones(ROWS, TEXT, 3, dtype=torch.int64),
        "image_sizes": torch.tensor([[[height, width]] * 3]),
    }


def long_patch(draw: Draw) -> Inputs:
    """The patches of an image side by side, and its shape in patches."""
    height, width = 4, 8
    pixels = draw.floats(1, 3, draw.patch, height * width * draw.patch)
    return {"pixel_values": pixels, "target_sizes": torch.tensor([[height, width]])}


def patches(draw: Draw) -> Inputs:
    """Patches of an image."""
    return {"pixel_values": draw.floats(ROWS, 12, 3 * draw.patch**2)}


def channels_last(draw: Draw) -> Inputs:
    """Patches of frames: (patches, frames, height, width, channels)."""
    side = draw.patch
    return {"pixel_values": draw.floats(6, draw.number("temporal_patch_size", 2), side, side, 3)}


def shapes(draw: Draw) -> Inputs:
    """Patches with padding, and the shape of the image."""
    m = draw.merge
    shape, count = [2 * m, 4 * m], draw.number("num_patches", 10 * m * m)
    mask = torch.zeros(ROWS, count, dtype=torch.int64)
    mask[:, : prod(shape)] = 1
    return {
        "pixel_values": draw.floats(ROWS, count, 3 * draw.patch**2),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([shape]),
    }


def positions(draw: Draw) -> Inputs:
    """Patches with their columns and rows."""
    kernel = draw.number("pooling_kernel_size", 1)
    height, width = 2 * kernel, 4 * kernel
    places = [[x, y] for y in range(height) for x in range(width)]
    found = torch.tensor([places])
    side = draw.number("model_patch_size", draw.patch)
    pixels = torch.rand(ROWS, len(places), 3 * side**2, generator=draw.generator)
    return {"pixel_values": pixels, "image_position_ids": found, "pixel_position_ids": found}


def flattened(draw: Draw) -> Inputs:
    """Patches that begin with their row and column."""
    height, width = 2, 5
    patches = draw.floats(ROWS, height * width, 2 + 3 * draw.number("patch_size", 8) ** 2)
    patches[..., 0] = torch.arange(1, height + 1.0).repeat_interleave(width)
    patches[..., 1] = torch.arange(1, width + 1.0).repeat(height)
    return {"flattened_patches": patches, "attention_mask": torch.ones(ROWS, height * width)}


def image_patches(draw: Draw) -> Inputs:
    """Patches of an image, one per placeholder token."""
    return {"image_patches": draw.floats(ROWS, 12, 3 * draw.patch**2)}


def images(factor: int, sized: bool = False) -> Callable[[Draw], Inputs]:
    """An image of the configured size times a factor, with what some models take beside it."""

    def make(draw: Draw) -> Inputs:
        height, width = (n * factor for n in draw.configured)
        inputs = {
            "pixel_values": draw.floats(ROWS, 3, height, width),
            "high_res_pixel_values": draw.floats(ROWS, 3, height, width),
            "input_points": torch.rand(ROWS, 1, 2, 2, generator=draw.generator) * height,
            "input_labels": torch.tensor([[[1, 0]]] * ROWS),
            "input_boxes": torch.tensor([[[2.0, 3.0, height - 5.0, width - 9.0]]] * ROWS),
        }
        return {**inputs, "image_sizes": torch.tensor([[height, width]] * ROWS)} if sized else inputs

    return make


def wide(draw: Draw) -> Inputs:
    """An image of a size that is not the configured one: for models that take any."""
    height, width = draw.configured
    return {"pixel_values": draw.floats(ROWS, 3, height, 2 * width)}


def video(argument: str) -> Callable[[Draw], Inputs]:
    """A video."""

    def make(draw: Draw) -> Inputs:
        frames = draw.number("num_frames", draw.number("frames_per_clip", 4))
        return {argument: draw.floats(ROWS, frames, 3, *draw.configured)}

    return make


def bins(draw: Draw) -> int:
    """Frequencies of a spectrogram."""
    names = ("num_chroma", "num_mel_bins", "mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_dim")
    found = [
        draw.field(name, None)
        for name in (*names, "feature_projection_input_dim", "input_feat_size", "audio_embed_dim")
    ]
    return int(next((x for x in found if isinstance(x, int)), 80))


def spectrogram(time: Callable[[Draw], int], transposed: bool = False, masked: bool = True) -> Callable[[Draw], Inputs]:
    """A spectrogram, by frequency and time or by time and frequency; ``masked`` where masks are of its time."""

    def make(draw: Draw) -> Inputs:
        shape = (bins(draw) * draw.number("num_stacked_frames", 1), time(draw))
        if not masked:
            return {"input_features": draw.floats(ROWS, *(reversed(shape) if transposed else shape))}
        mask = torch.ones(ROWS, shape[1], dtype=torch.int64)
        return {
            "input_features": draw.floats(ROWS, *(reversed(shape) if transposed else shape)),
            **dict.fromkeys(("feature_attention_mask", "input_features_mask", "padding_mask"), mask),
        }

    return make


def positions_of_encoder(draw: Draw) -> int:
    """Time that fills the positions of an encoder whose convolutions halve it."""
    return 2 * draw.number("max_source_positions", 42)


def windows(draw: Draw) -> int:
    """Time that is two chunks of an encoder that works chunk by chunk."""
    return 4 * draw.number("n_window", 42)


def waveform(channels: bool) -> Callable[[Draw], Inputs]:
    """Samples."""

    def make(draw: Draw) -> Inputs:
        return {"input_values": draw.floats(ROWS, *([1] if channels else []), 1600)}

    return make


def values_by_time(draw: Draw) -> Inputs:
    """A spectrogram under the name of samples."""
    return {"input_values": draw.floats(ROWS, draw.number("max_length", 84), bins(draw))}


def fused(draw: Draw) -> Inputs:
    """A spectrogram as an image."""
    size, count = draw.number("spec_size", 64), bins(draw)
    features_ = draw.floats(ROWS, 1, size * size // count, count)
    return {"input_features": features_, "is_longer": torch.zeros(ROWS, 1, dtype=torch.bool)}


def text(draw: Draw) -> Inputs:
    """Nothing but text."""
    return {}


IMAGES: list[tuple[tuple[str, ...], Callable[[Draw], Inputs]]] = [
    (("image_grid_thw",), grids),
    (("image_grid_thw",), grids_of_squares),
    (("aspect_ratio_ids",), tiles),
    (("spatial_shapes",), shapes),
    (("target_sizes",), long_patch),
    (("image_position_ids",), positions),
    (("pixel_position_ids",), positions),
    (("flattened_patches",), flattened),
    (("pixel_attention_mask",), several),
    (("image_attention_mask",), several),
    (("image_sizes",), crops),
    (("image_sizes",), padded),
    (("pixel_values", "pixel_mask"), wide),
    (("pixel_values",), images(1)),
    (("pixel_values", "image_sizes"), images(1, sized=True)),
    (("pixel_values",), images(4)),
    (("pixel_values",), crops),
    (("pixel_values",), several),
    (("pixel_values",), video("pixel_values")),
    (("pixel_values",), patches),
    (("pixel_values",), channels_last),
    (("pixel_values_videos",), video("pixel_values_videos")),
    (("image_patches",), image_patches),
]
AUDIO: list[tuple[tuple[str, ...], Callable[[Draw], Inputs]]] = [
    (("input_features",), spectrogram(positions_of_encoder)),
    (("input_features",), spectrogram(lambda draw: 84)),
    (("input_features",), spectrogram(lambda draw: 84, transposed=True)),
    (("input_features",), spectrogram(lambda draw: 84, transposed=True, masked=False)),
    (("input_features",), spectrogram(windows)),
    (("is_longer",), fused),
    (("input_values",), waveform(False)),
    (("input_values",), waveform(True)),
    (("input_values",), values_by_time),
]


def candidates(arguments: Any) -> Iterator[Callable[[Draw], Inputs]]:
    """What to try, in this order; a model with images and audio gets both if it takes both."""
    have = set(arguments) - {"self"}
    images_, audio = ([make for marks, make in ways if have.issuperset(marks)] for ways in (IMAGES, AUDIO))
    for each in images_:
        for other in audio:
            yield lambda draw, each=each, other=other: {**each(draw), **other(draw)}
    yield from images_
    yield from audio
    yield text


# -- what goes with them ---------------------------------------------------------------------------------------------


def complete(model: Any, arguments: Any, modal: Inputs) -> Inputs:
    """These inputs with token ids, and without what the model does not take."""
    draw = Draw(model)
    inputs = {name: value for name, value in modal.items() if name in arguments}
    if not inputs and "input_ids" not in arguments:
        raise NoInputs("no argument of the model is known")
    for name in arguments:
        if name not in inputs and name.endswith("_input_ids") and not name.startswith(("audio", "decoder")):
            inputs[name] = draw.ids(ROWS, 5)
    if "input_ids" in arguments and not speaks(model):
        ids, kinds = draw.ids(ROWS, 2), [0, 0]
        for what, kind in KINDS.items():
            for count in features(model, what, inputs):  # each between two tokens, as processors put them
                run = [EDGES[0], *[TOKENS[what]] * count, EDGES[1]]
                ids = torch.cat((ids, torch.tensor([run])), 1)
                kinds += [0, *[kind] * count, 0]
        ids = torch.cat((ids, draw.ids(ROWS, TEXT - 2)), 1)
        kinds = torch.tensor([[*kinds, *[0] * (TEXT - 2)]])
        inputs["input_ids"] = ids
        if "attention_mask" in arguments:
            inputs["attention_mask"] = torch.ones_like(ids)
        if "mm_token_type_ids" in arguments and kinds.any():
            inputs["mm_token_type_ids"] = kinds
        if "token_type_ids" in arguments and kinds.any():  # as processors pass them
            inputs["token_type_ids"] = (kinds == KINDS["image"]).long()
        if "bbox" in arguments:
            inputs["bbox"] = torch.tensor([1, 2, 3, 4]).expand(*ids.shape, 4).contiguous()
    if "decoder_input_ids" in arguments:
        books = len(draw.field("delay_pattern", [])) or draw.number("num_codebooks", 1)
        inputs["decoder_input_ids"] = draw.ids(ROWS * books, 5)
    if "image_embeds_position_mask" in arguments and modal:
        count = draw.number("latent_query_num", 6)
        ids = torch.cat((inputs["input_ids"][:, :2], draw.ids(ROWS, count), inputs["input_ids"][:, 2:]), 1)
        mask = torch.zeros_like(ids)
        mask[:, 2 : 2 + count] = 1
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_embeds_position_mask": mask}
    if "state" in arguments:
        inputs["state"] = draw.floats(ROWS, draw.number("max_state_dim", 32))
    if "prompt_pixel_values" in arguments:
        inputs["prompt_pixel_values"] = torch.randn_like(inputs["pixel_values"])
        inputs["prompt_masks"] = torch.rand_like(inputs["pixel_values"])
    if "task_inputs" in arguments:
        inputs["task_inputs"] = draw.ids(ROWS, draw.number("task_seq_len", 12))
    if "decoder_input_values" in arguments:
        inputs["decoder_input_values"] = draw.floats(ROWS, 10, bins(draw))
        inputs["speaker_embeddings"] = draw.floats(ROWS, draw.number("speaker_embedding_dim", 24))
    return inputs


def speaks(model: Any) -> bool:
    """Whether the token ids of a model are those of its decoder, or it has none with audio."""
    return (
        getattr(model, "main_input_name", "input_ids") != "input_ids"
        and bool(getattr(model.config, "is_encoder_decoder", False))
        and "decoder_input_ids" in inspect.signature(type(model).forward).parameters
        and not hasattr(model, "qformer")
    )


def signature(method: Any) -> Any:
    """The parameters of a method."""
    return inspect.signature(method).parameters


def features(model: Any, what: str, inputs: Inputs) -> list[int]:
    """Features of every image, video or piece of audio, counted by computing them."""
    methods = (getattr(m, f"get_{what}_features", None) for m in model.modules())
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD  # the first that does not hand its arguments on as they come
    method = next((x for x in methods if x and any(p.kind is named for p in signature(x).values())), None)
    names = [n for each in nested(model.config) for n in vars(each) if n.startswith(f"{what}_token_")]
    if what == "audio" and method is None and "feature_attention_mask" in inputs:
        return [((inputs["feature_attention_mask"].shape[-1] - 1) // 2 + 1) // 2]  # a convolution, then pooling
    if method is None or not names:
        return []
    passed = {name: value for name, value in inputs.items() if name in signature(method)}
    if "image_patches" in inputs and "pixel_values" in signature(method):
        passed["pixel_values"] = inputs["image_patches"]
    if not any(value.is_floating_point() for value in passed.values()):
        return []
    if "padding_mask" in inputs or "image_merge_sizes" in inputs:
        passed |= {key: value for key, value in inputs.items() if key in ("padding_mask", "image_merge_sizes")}
    draw = Draw(model)
    for name, parameter in signature(method).items():  # what the model's own forward takes from the configuration
        if parameter.default is parameter.empty and name not in passed and draw.field(name, None) is not None:
            passed[name] = draw.field(name, None)
    grid = inputs.get(f"{what}_grid_thw")
    if grid is None or f"{what}_grid_thw" not in passed or len(grid) == 1:
        return counted(method, passed, 1 if grid is None else len(grid))
    main = "pixel_values" if what == "image" else f"pixel_values_{what}s"
    pieces = passed[main].split([int(prod(each)) for each in grid.tolist()])
    try:  # images of different sizes, one by one
        own = [{**passed, main: piece, f"{what}_grid_thw": row[None]} for piece, row in zip(pieces, grid, strict=True)]
        return [sum(counted(method, each, 1)) for each in own]
    except Exception:  # other inputs are of all images
        return counted(method, passed, len(grid))


def counted(method: Any, passed: Inputs, count: int) -> list[int]:
    """Features of every image, video or piece of audio of this call of the model's own method."""
    with torch.no_grad():
        found = method(**passed)
    if hasattr(found, "last_hidden_state"):
        pooled = getattr(found, "pooler_output", None)
        found = found.last_hidden_state if pooled is None else pooled
    if isinstance(found, (list, tuple)):
        return [x.numel() // x.shape[-1] for x in found]
    return [found.numel() // found.shape[-1] // count] * count
