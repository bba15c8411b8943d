"""The names of a checkpoint's files: which ones hold its weights, and none of them outside of its folder."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def weight_names(variant: str | None = None, explicit: Any = None, where: Path | None = None) -> tuple[str, str]:
    """The names of the index and of the single file of a checkpoint.

    Args:
        variant: A variant of the weights, as ``fp16`` in ``model.fp16.safetensors``.
        explicit: What the configuration ``where`` names in ``transformers_weights``: a file, or an index.
        where: The configuration, for errors.
    """
    if explicit is not None and where is not None:
        check_name(explicit, where, "transformers_weights")
        if explicit.endswith(".safetensors.index.json"):
            return explicit, SINGLE_NAME
        if not explicit.endswith(".safetensors"):
            raise CheckpointError(f"{str(where)!r}: transformers_weights is {explicit!r}, no safetensors file or index")
        return "", explicit
    if variant is None:
        return INDEX_NAME, SINGLE_NAME
    if not variant or not all(c.isalnum() or c in "-_." for c in variant) or ".." in variant:
        raise ValueError(f"variant={variant!r} is not a part of a file name, as 'fp16' in model.fp16.safetensors")
    return f"model.safetensors.index.{variant}.json", f"model.{variant}.safetensors"


def read_index(index: Path) -> dict[str, str]:
    """For every tensor in an index of safetensors files the name of its file, relative to the index.

    Raises:
        CheckpointError: It is no index, or one of its entries leads out of its folder.
    """
    try:
        entries: dict[str, Any] = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(index)!r} is not an index of safetensors files: {error!r}") from error
    for key, name in entries.items():
        check_name(name, index, f"the entry {key!r}")
    return entries


def check_name(name: Any, where: Path, entry: str) -> None:
    """Raise unless ``name``, which the file ``where`` has under ``entry``, stays inside of the folder of ``where``.

    A checkpoint is data of somebody else: it must not be able to name files of this machine. Only the name is checked:
    symbolic links, which the Hub's cache is made of, were put there by whoever owns the folder.
    """
    if isinstance(name, str) and _is_inside(name):
        return
    raise CheckpointError(
        f"{str(where)!r}: {entry} is {name!r}, which is not the name of a file in the checkpoint's folder. Files "
        "outside of it are not read: put the file into the folder and its name into the entry, and use the checkpoint "
        "only if you trust where it comes from."
    )


def _is_inside(name: str) -> bool:
    """Whether a path, of Linux or Windows, is relative and never goes up."""
    flavours = (PurePosixPath(name), PureWindowsPath(name))
    return all(not path.anchor and ".." not in path.parts for path in flavours)
