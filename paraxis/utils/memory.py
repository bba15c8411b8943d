"""Giving memory back to the system after work that left much of it free.

Capturing, planning and compiling make millions of small objects. The C library keeps what they leave, in pieces that
no weight, gradient or activation fits into, and a rank would hold that beside them for as long as it runs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's function for it; None with other libraries, which do it by themselves or not at all."""
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None


def malloc_trim() -> None:
    """Return to the system what this process has freed. Takes milliseconds."""
    trim = _trim()
    if trim is not None:
        trim(0)
