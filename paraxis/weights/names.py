"""The names that a checkpoint's tensors have in the model, by transformers' own tables of renamings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..compat.transformers import checkpoint_conversions


class CheckpointNames:
    """From keys of a checkpoint to names of parameters.

    Keys may have the prefix of the base model or lack it, may be older names that transformers renames, and may be
    parts or other forms of a parameter that transformers converts (see :mod:`.convert`).
    """

    def __init__(self, names: Iterable[str], prefix: str, model: nn.Module | None) -> None:
        self.known = set(names)
        self.prefix = f"{prefix}." if prefix else ""
        self.renamings, self.converters = transforms(model)

    def locate(self, key: str) -> str | None:
        """The name of ``key``, which may have been saved with the prefix of the base model or without it."""
        if key in self.known:
            return key
        if self.prefix and self.prefix + key in self.known:
            return self.prefix + key
        bare = key.removeprefix(self.prefix)
        return bare if bare in self.known else None

    def renamed(self, key: str) -> str:
        """The key under its current name in transformers."""
        for renaming in self.renamings:
            key = renaming.rename_source_key(key)[0]
        return key

    def of(self, key: str) -> str | None:
        """The name of the parameter that the tensor ``key`` is, or ``None``."""
        if self.converted(key) is not None:
            return None  # its values are not the parameter's, even if name and shape are
        # A renaming to a name that the model does not have does not apply to this checkpoint.
        return self.locate(self.renamed(key)) or self.locate(key)

    def converted(self, key: str) -> tuple[str, Any, str] | None:
        """The first parameter that ``key`` is a part or another form of, with the converter and its pattern for it."""
        renamed = self.renamed(key)
        for converter in self.converters:
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                name = self.locate(target)
                return None if name is None else (name, converter, pattern)
        return None


def transforms(model: nn.Module | None) -> tuple[list[Any], list[Any]]:
    """What transformers applies to checkpoints of this model: (renamings, conversions)."""
    if model is None or not hasattr(model, "base_model_prefix"):
        return [], []
    if model in _known:
        return _known[model]
    _known[model] = checkpoint_conversions(model)
    return _known[model]


_known: WeakKeyDictionary[nn.Module, tuple[list[Any], list[Any]]] = WeakKeyDictionary()
"""A cache: they take transformers a quarter of a second to build, and are needed several times."""
