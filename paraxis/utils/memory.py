"""Process memory: garbage collection, returning what was freed to the operating system, and how much there is.

Capturing, planning and compiling allocate millions of small objects. The C library retains their memory, fragmented
into pieces too small for weights, gradients or activations, and a rank would hold it for as long as it runs.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def gc_paused() -> Iterator[None]:
    """Without Python's garbage collection, for stages that allocate much and free little: imports, captures."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


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


def available_memory() -> int:
    """Bytes that this process can allocate without swapping, of the machine or of its control group."""
    free = _meminfo("MemAvailable")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(min(free, int(limit) - used), 0)


def _meminfo(field: str) -> int:
    """A field of Linux's memory statistics; elsewhere half of the physical memory."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
