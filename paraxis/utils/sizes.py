"""Numbers of bytes, for people."""

from __future__ import annotations


def size_text(size: float) -> str:
    """A number of bytes with three digits and a unit: ``16.1 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} {unit}"
        size /= 1000
    raise AssertionError
