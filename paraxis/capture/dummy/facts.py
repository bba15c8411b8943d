"""What is known of a model's inputs before it runs: its signature, its configurations, its processor's files.

Field names are those that transformers uses everywhere. A field may be in the model's configuration or in one of its
sub-configurations, so it is looked up by what it is about: ``vision`` looks where images are configured first, and then
everywhere else.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

VISION = ("vision", "image", "visual", "video", "vit", "backbone", "encoder", "perceiver")
AUDIO = ("audio", "speech", "sound", "encoder", "wav")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class Facts:
    """What the functions that make dummy inputs may look at.

    Attributes:
        model: The model.
        batch: Rows of every input.
        length: Tokens of a row of text.
        device: Where the inputs are.
    """

    model: nn.Module
    batch: int
    length: int
    device: torch.device

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @cached_property
    def arguments(self) -> dict[str, inspect.Parameter]:
        """The arguments of the model's forward, by name; of one that takes any, those that its kind of model has."""
        parameters = inspect.signature(type(self.model).forward).parameters
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        found = {name: p for name, p in parameters.items() if name != "self" and p.kind not in kinds}
        main = getattr(self.model, "main_input_name", "input_ids")
        main = main[0] if isinstance(main, (list, tuple)) else main
        if main not in found and len(found) < len(parameters) - 1:
            names = [main, *(["decoder_input_ids"] if getattr(self.config, "is_encoder_decoder", False) else [])]
            found |= {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names}
        return found

    @cached_property
    def required(self) -> list[str]:
        """The arguments without a default."""
        return [name for name, p in self.arguments.items() if p.default is inspect.Parameter.empty]

    @cached_property
    def modalities(self) -> tuple[str, ...]:
        """What the class says it takes: text, image, video, audio; empty for a class that does not say."""
        found = getattr(self.model, "input_modalities", ())
        return (found,) if isinstance(found, str) else tuple(found)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    @cached_property
    def configs(self) -> list[tuple[str, Any]]:
        """The configuration and all in it, outer ones first, each with its path."""
        return list(_nested("", self.config))

    @cached_property
    def processor(self) -> dict[str, Any]:
        """The fields of the processor's files in the folder of the checkpoint; empty without any."""
        found: dict[str, Any] = {}
        folder = getattr(self.config, "name_or_path", "") or ""
        for name in PROCESSOR_FILES:
            path = Path(folder) / name
            if folder and path.is_file():
                try:
                    data = json.loads(path.read_text())
                except (OSError, ValueError):
                    continue
                for inner in (data, *(v for v in data.values() if isinstance(v, dict))):
                    found = {**inner, **found}
        return found

    def vision(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that a configuration for images has."""
        return self.field(VISION, names, default)

    def audio(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that a configuration for audio has."""
        return self.field(AUDIO, names, default)

    def text(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that the configuration for text has."""
        try:
            inner = self.config.get_text_config()
        except (AttributeError, ValueError):  # there is none, or there are several
            inner = self.config
        for config in (inner, self.config):
            for name in names:
                value = _read(config, name)
                if value is not None:
                    return value
        return self.field((), names, default)

    def field(self, about: tuple[str, ...], names: tuple[str, ...], default: Any = None) -> Any:
        """The first of these fields, in configurations whose path has one of the words, then in the others."""
        ordered = sorted(self.configs, key=lambda item: not any(word in item[0] for word in about))
        for name in names:
            for _, config in ordered:
                value = _read(config, name)
                if value is not None:
                    return value
        for name in names:
            if self.processor.get(name) is not None:
                return self.processor[name]
        return default

    # -- sizes that several kinds of input share ------------------------------------------------------------------

    @cached_property
    def patch(self) -> int:
        """The side of a patch of an image."""
        found = self.vision("patch_size", default=16)
        found = found.get("height", 16) if isinstance(found, dict) else found
        return int(found[-1] if isinstance(found, (list, tuple)) else found)

    @cached_property
    def channels(self) -> int:
        """The channels of an image."""
        found = self.vision("num_channels", "in_channels", "in_chans", default=3)
        return int(found[0] if isinstance(found, (list, tuple)) else found)

    @cached_property
    def temporal(self) -> int:
        """The frames of a patch of a video."""
        found = self.vision("temporal_patch_size", "tubelet_size", default=1)
        return int(found[0] if isinstance(found, (list, tuple)) else found)

    @cached_property
    def merge(self) -> int:
        """How many patches of a side become one token."""
        found = self.vision("spatial_merge_size", "merge_size", "merge_kernel_size", default=2)
        return int(found[0] if isinstance(found, (list, tuple)) else found)

    @cached_property
    def image_size(self) -> tuple[int, int]:
        """Height and width of an image."""
        found = self.vision("image_size", "img_size", "crop_size", "input_size")
        if found is None:
            found = self.processor.get("crop_size") or self.processor.get("size") or 224
        if isinstance(found, dict):
            found = found.get("height") or found.get("shortest_edge") or 224
        if isinstance(found, (list, tuple)):
            return int(found[-2] if len(found) > 1 else found[0]), int(found[-1])
        return int(found), int(found)

    @cached_property
    def frames(self) -> int:
        """Frames of a video."""
        found = self.vision("num_frames", "frames_per_clip", "num_image_with_embedding", default=2 * self.temporal)
        return int(found if isinstance(found, int) and found > 0 else 2 * self.temporal)

    @cached_property
    def codebooks(self) -> int:
        """Rows of the decoder's token ids for each row of the input: one per codebook, of a decoder that has some."""
        decoder = _read(self.config, "decoder") or _read(self.config, "decoder_config")
        found = _read(decoder, "num_codebooks") or _read(decoder, "num_channels")
        return found if isinstance(found, int) else 1

    def floats(self, *shape: int) -> torch.Tensor:
        """A tensor of the model's dtype whose rows differ: equal ones would hide from a rule what it depends on."""
        count = 1
        for size in shape:
            count *= size
        values = torch.arange(count, dtype=torch.float32).remainder_(97.0).div_(97.0)
        return values.reshape(shape).to(self.device, self.dtype)

    def ints(self, *shape: int, value: int = 1) -> torch.Tensor:
        """A tensor of one integer."""
        return torch.full(shape, value, dtype=torch.int64, device=self.device)


def _nested(path: str, config: Any) -> Iterator[tuple[str, Any]]:
    yield path, config
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and value is not config:
            yield from _nested(f"{path}.{name}".lower(), value)


def _read(config: Any, name: str) -> Any:
    """A field; None if there is none, or if the configuration refuses to say."""
    try:
        return getattr(config, name, None)
    except Exception:  # a configuration raises for fields that differ from layer to layer
        return None
