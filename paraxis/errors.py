"""Errors that Paraxis raises by name."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """A collective failed on this rank: a rank did not join it, joined another one, or died.

    The message names the collective, the tensor and the rank; the backend's own error is the cause.
    """
