"""The parallel layers: Megatron's column, row and vocabulary parallel modules, usable without a captured graph."""

from .embedding import VocabParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .loss import VocabParallelCrossEntropyLoss, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelCrossEntropyLoss",
    "VocabParallelEmbedding",
    "vocab_parallel_cross_entropy",
]
