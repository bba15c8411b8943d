"""The user's own line on the stack, for errors and warnings whose cause is found deep in libraries."""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from collections.abc import Callable
from functools import cache
from types import FrameType

LIBRARIES = ("paraxis", "torch", "transformers", "accelerate", "peft", "safetensors", "huggingface_hub")
"""Packages whose frames are not the user's."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def user_line() -> str:
    """The innermost line of the user's own code on the stack, as ``file:line``; empty if there is none."""
    frame, _ = _find(lambda file: not _is_library(file))
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def warn_user(message: str) -> None:
    """Warn at the innermost line of the user's own code; if there is none, at the innermost outside of Paraxis."""
    frame, level = _find(lambda file: not _is_library(file))
    if frame is None:
        frame, level = _find(lambda file: not file.startswith((_PACKAGE, "<")))
    warnings.warn(message, stacklevel=level if frame is not None else 2)


def _find(accepts: Callable[[str], bool]) -> tuple[FrameType | None, int]:
    """The innermost frame whose file is accepted, and its ``stacklevel`` from the function that calls this one."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not accepts(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return frame, level


@cache
def _is_library(file: str) -> bool:
    """Whether a file belongs to Python, or to a library between the user and a collective."""
    if file.startswith("<"):
        return True
    parts = file.replace(os.sep, "/").split("/")
    if "site-packages" in parts:
        inside = parts[parts.index("site-packages") + 1 :]
        return bool(inside) and inside[0] in LIBRARIES
    return file.startswith((_PACKAGE, _STDLIB))
