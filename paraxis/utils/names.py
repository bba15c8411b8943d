"""Qualified names of modules and parameters: what repeated blocks have in common, and which block a name is in."""

from __future__ import annotations


def pattern_of(name: str) -> str:
    """A name with its numbers replaced by ``*``: the same for all repetitions of a block."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def block_of(name: str) -> str:
    """The outermost numbered module of a name; empty if there is none."""
    parts = name.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else ""
