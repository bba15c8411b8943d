"""Checkpoints: finding them, knowing what is in them, and reading from them only what a rank needs."""

from ..errors import CheckpointError
from .materialize import materialize_parameters

__all__ = ["CheckpointError", "materialize_parameters"]
