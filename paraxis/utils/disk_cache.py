"""A cache of small files on disk: plans, and which tensor of a checkpoint is which parameter.

They are in ``$PARAXIS_CACHE``, by default ``~/.cache/paraxis``; an empty ``PARAXIS_CACHE`` disables the cache. Each
file is named by a digest of everything it was computed from, so a change of that is a cache miss. A file that cannot be
read or written is a cache miss too, not an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compat.transformers import implementations

MAX_FILES = 200
"""Files of each kind; the least recently used ones are deleted."""


def directory(kind: str) -> Path | None:
    """The directory for files of a kind; None if the cache is disabled."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("PARAXIS_CACHE", f"{home}/paraxis")
    return Path(root).expanduser() / kind if root else None


def read(kind: str, key: str | None) -> Any:
    """The cached data of a key; None on a cache miss."""
    folder = directory(kind)
    if key is None or folder is None:
        return None
    file = folder / f"{key}.json"
    try:
        data = json.loads(file.read_text())
        os.utime(file)  # most recently used
    except (OSError, ValueError):  # missing or corrupt
        return None
    return data


def write(kind: str, key: str | None, data: Any) -> None:
    """Cache plain data under a key, atomically."""
    folder = directory(kind)
    if key is None or folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump(data, file)
        os.replace(file.name, folder / f"{key}.json")
        files = sorted(folder.glob("*.json"), key=lambda f: f.stat().st_mtime, reverse=True)
        for old in files[MAX_FILES:]:
            old.unlink(missing_ok=True)
    except OSError:
        pass


def key_of(model: nn.Module, *, code: bool = True, **others: Any) -> str | None:
    """A cache key for what follows from a transformers model and other plain data; None if there is none.

    The model is identified by its class, its configuration and the versions of all code involved; without ``code``, by
    what is the same for ranks on several machines. A user's own module, whose forward may be anything, has no key.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    try:
        content = {
            **others,
            "code": [_package(), torch.__version__, _version("transformers"), sys.version_info[:2]] if code else [],
            "model": [type(model).__qualname__, _source(type(model)), _settings(config)],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]
    except (OSError, TypeError, ValueError):  # a missing file, or a configuration with keys of several types
        return None


def _settings(config: Any) -> dict[str, Any]:
    """A configuration without its path, and with the implementations that ``to_dict`` leaves out."""
    settings = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    return {**settings, "computed by": implementations(config)}


@cache
def _package() -> str:
    """A digest of this package's files on disk: an edit of the code must invalidate what the old code cached."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(repr([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]).encode()).hexdigest()


def _source(cls: type) -> str:
    """A digest of the file that defines a class: the code of a model may come with its checkpoint."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", ""))
