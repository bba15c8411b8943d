"""Small files that spare the next run some work: plans, and which tensor of a checkpoint is which parameter.

They lie in ``$PARAXIS_CACHE``, by default ``~/.cache/paraxis``; with an empty ``PARAXIS_CACHE`` nothing is kept. Each
is named by a digest of all that it was made from: once that has changed, it is not found again. What keeps one from
being read or written is no error: the work is done anew.
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

KEPT = 200
"""So many files of each kind are kept; the least recently used go."""


def directory(kind: str) -> Path | None:
    """Where files of a kind are kept; None if they are not to be."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("PARAXIS_CACHE", f"{home}/paraxis")
    return Path(root).expanduser() / kind if root else None


def read(kind: str, key: str | None) -> Any:
    """What was kept under a key; None if there is nothing."""
    folder = directory(kind)
    if key is None or folder is None:
        return None
    file = folder / f"{key}.json"
    try:
        data = json.loads(file.read_text())
        os.utime(file)  # used just now
    except (OSError, ValueError):  # not there, or broken: it is made and written anew
        return None
    return data


def write(kind: str, key: str | None, data: Any) -> None:
    """Keep plain data under a key, whole or not at all."""
    folder = directory(kind)
    if key is None or folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump(data, file)
        os.replace(file.name, folder / f"{key}.json")
        files = sorted(folder.glob("*.json"), key=lambda f: f.stat().st_mtime, reverse=True)
        for old in files[KEPT:]:
            old.unlink(missing_ok=True)
    except OSError:
        pass


def key_of(model: nn.Module, *, code: bool = True, **others: Any) -> str | None:
    """A key for what follows from a model of transformers and other plain data; None if there is no telling.

    The model is told by its class, its configuration and the versions of all code that makes it what it is; without
    ``code``, by what ranks on several machines have in common. A module of the user's own, whose forward may be
    anything, has no key.
    """
    described = getattr(model, "config", None)
    if not hasattr(described, "to_dict"):
        return None
    try:
        known = {
            **others,
            "code": [_package(), torch.__version__, _version("transformers"), sys.version_info[:2]] if code else [],
            "model": [type(model).__qualname__, _source(type(model)), _settings(described)],
        }
        return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:32]
    except (OSError, TypeError, ValueError):  # a file that is gone, a configuration with keys of several kinds
        return None


def _settings(described: Any) -> dict[str, Any]:
    """A configuration, less where it came from, with the ways to compute that are not written to files."""
    settings = {name: value for name, value in described.to_dict().items() if name != "_name_or_path"}
    chosen = [getattr(described, name, None) for name in ("_attn_implementation", "_experts_implementation")]
    return {**settings, "computed by": chosen}


@cache
def _package() -> str:
    """This package, as it is on the disk: whoever works on it must not be given what yesterday's code made."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(repr([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]).encode()).hexdigest()


def _source(cls: type) -> str:
    """The file that a class is from: the code of a model may come with its checkpoint."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", ""))
