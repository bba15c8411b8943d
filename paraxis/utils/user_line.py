"""Warnings that point at the user's line, however deep in libraries their cause is found."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_LIBRARIES = ("paraxis", "torch", "transformers", "accelerate", "peft")


def warn_user(message: str) -> None:
    """Warn at the innermost line outside of Paraxis and of the libraries that run models; else, outside of Paraxis."""
    warnings.warn(message, stacklevel=_level(_LIBRARIES) or _level(_LIBRARIES[:1]) or 2)


def _level(libraries: tuple[str, ...]) -> int:
    """The ``stacklevel`` of that line, from :func:`warn_user`; 0 if all of the stack is in these libraries."""
    folders = tuple(folder for name in libraries if (folder := _folder(name)))
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(folders) and not name.startswith("<"):
            return level
        frame, level = frame.f_back, level + 1
    return 0


def _folder(library: str) -> str | None:
    file = getattr(sys.modules.get(library), "__file__", None)
    return os.path.join(os.path.dirname(file), "") if file else None
