"""Room on Python's stack for the calls that a compiled program makes.

Python keeps frames in pieces of 16 KB and gives a piece back when its last frame ends. A frame that does not fit into
what is left of a piece gets a new one, which is large enough for some calls as well. The frame of a program that fills
the caches of many layers takes most of a piece. If it just fits into what is left, each of the hundreds of short calls
that fill the caches has a piece mapped and unmapped for itself, which takes longer than everything else that the
program does in Python.
"""

from __future__ import annotations

from types import CodeType

PIECE = 1 << 14
"""Bytes of a piece."""
SLOT = 8
OVERHEAD = 8
"""Slots of a frame for Python itself; there are not fewer."""


def frame_of(code: CodeType) -> int:
    """The size of its frame, in bytes."""
    names = len(code.co_varnames) + len(code.co_cellvars) + len(code.co_freevars)
    return SLOT * (names + code.co_stacksize + OVERHEAD)


def with_room(code: CodeType) -> CodeType:
    """The same code; a frame of more than half a piece is made to need one of its own."""
    size = frame_of(code)
    if not PIECE // 2 <= size < PIECE:
        return code
    return code.replace(co_stacksize=code.co_stacksize + (PIECE - size) // SLOT)
