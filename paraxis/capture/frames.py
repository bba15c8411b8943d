"""Room on Python's stack for the calls that a compiled program makes.

Python keeps frames in pieces of 16 KB, makes a larger piece for a frame that does not fit into one, and gives a piece
back when its last frame ends. The frame of a program that fills caches for many layers is about as large as a piece. If
it leaves little room, each of the hundreds of short calls that fill the caches has a piece mapped and unmapped for
itself, which takes longer than everything else that the program does in Python.
"""

from __future__ import annotations

from types import CodeType

PIECE = 1 << 14
"""Bytes of a piece; larger ones are twice, four times as large and so on."""
LEAST = 1 << 13
"""Bytes that calls should find."""
SLOT = 8
OVERHEAD = 24
"""Slots of a frame for Python itself, and of a piece; some more than there are."""


def frame_of(code: CodeType) -> int:
    """The size of its frame, in bytes."""
    names = len(code.co_varnames) + len(code.co_cellvars) + len(code.co_freevars)
    return SLOT * (names + code.co_stacksize + OVERHEAD)


def left_by(code: CodeType) -> int:
    """The bytes that are left in a piece which was made for its frame."""
    size, piece = frame_of(code), PIECE
    while piece < size:
        piece *= 2
    return piece - size


def with_room(code: CodeType) -> CodeType:
    """The same code, whose frame comes in a larger piece if it would leave little in its own.

    Small frames share a piece with those of their callers, and are left alone.
    """
    if frame_of(code) < PIECE // 2 or left_by(code) >= LEAST:
        return code
    return code.replace(co_stacksize=code.co_stacksize + left_by(code) // SLOT + 1)
