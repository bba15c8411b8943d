"""Computing cached properties before capture: Dynamo cannot trace the first access, which computes and stores them.

Modules have them, and so have plain objects that a module keeps to look something up in (a table from image tokens to
those of text). After the first access they are attributes like others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn


def compute_cached_properties(model: nn.Module) -> None:
    """Access every ``functools.cached_property`` of the modules and of the plain objects that they keep.

    One that raises, because it needs what is there in a call only, is left for the call.
    """
    names: dict[type, list[str]] = {}
    with torch.no_grad():
        for owner in _owners(model):
            cls = type(owner)
            if cls not in names:
                names[cls] = _cached_properties(cls)
            for name in names[cls]:
                if name not in owner.__dict__:
                    with suppress(Exception):
                        getattr(owner, name)


def _owners(model: nn.Module) -> Iterator[Any]:
    """The modules, and the objects in their attributes; each once."""
    seen: set[int] = set()
    for module in model.modules():
        for each in (module, *vars(module).values()):
            if id(each) not in seen and hasattr(each, "__dict__") and not isinstance(each, (type, torch.Tensor)):
                seen.add(id(each))
                yield each


def _cached_properties(cls: type) -> list[str]:
    """The names of a class's cached properties."""
    found = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return [name for name, value in found.items() if isinstance(value, functools.cached_property)]
