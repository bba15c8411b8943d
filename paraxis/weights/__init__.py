"""Checkpoints: finding them, mapping their tensors to parameters, and reading only this rank's shards."""

from ..errors import CheckpointError
from .materialize import materialize_parameters

__all__ = ["CheckpointError", "materialize_parameters"]
