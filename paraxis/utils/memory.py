"""Returning freed memory to the operating system.

Capturing, planning and compiling allocate millions of small objects. The C library retains their memory, fragmented
into pieces too small for weights, gradients or activations, and a rank would hold it for as long as it runs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``; None with other C libraries."""
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None


def malloc_trim() -> None:
    """Return the memory that this process has freed to the operating system. Takes milliseconds."""
    trim = _trim()
    if trim is not None:
        trim(0)
