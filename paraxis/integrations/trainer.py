"""``ParallelTrainer``: ``transformers.Trainer`` with the mixin, for those who want to say so in the class."""

from __future__ import annotations

from transformers import Trainer

from .trainer_mixin import ParallelTrainerMixin

__all__ = ["ParallelTrainer", "ParallelTrainerMixin"]


class ParallelTrainer(ParallelTrainerMixin, Trainer):
    """``transformers.Trainer`` for models of :func:`paraxis.parallelize_model`, with the same arguments."""
