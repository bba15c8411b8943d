"""The parallel layers. They know nothing of graphs: each can be used by hand."""

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
