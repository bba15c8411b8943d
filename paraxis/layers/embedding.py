"""The embedding whose table is sharded on the vocabulary dimension."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ..context import ParallelExecutionCtx
from ..distributed import differentiable_all_reduce_sum, differentiable_reduce_scatter_sum
from ..rules.indexing import local_ids
from ..tensor.sharded_tensor import unwrap
from .linear import SEQUENCE_DIM, layout_of, local_parameter


def _look_up(weight: torch.Tensor, ids: torch.Tensor, padding: int | None) -> torch.Tensor:
    """``F.embedding``, also where somebody has patched that: the patch is in the captured program already."""
    return torch.ops.aten.embedding.default(weight, ids, -1 if padding is None else padding)  # type: ignore[no-any-return]


class EmbeddingParameters(NamedTuple):
    """The parameters and options of an embedding."""

    weight: torch.Tensor
    padding_idx: int | None = None


class VocabParallelEmbedding(nn.Module):
    """An embedding of which every rank holds a range of token ids.

    A rank looks up the ids it holds and has zeros for the others; an all-reduce gives the embedding.

    Args:
        ctx: The ranks.
        embedding: An ``nn.Embedding`` with a plain weight (of which the layer copies this rank's rows) or a
            sharded one (which it uses without a copy).
        sequence_parallel: Whether to return the result sharded on the sequence dimension (-2), by a
            reduce-scatter.
        reduce_output: Whether to all-reduce. With ``False`` the result is partial: this rank's term of the sum.
    """

    weight: nn.Parameter

    def __init__(
        self,
        ctx: ParallelExecutionCtx,
        embedding: nn.Embedding | EmbeddingParameters,
        sequence_parallel: bool = False,
        *,
        reduce_output: bool = True,
    ) -> None:
        super().__init__()
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option, None) not in (None, False):
                raise NotImplementedError(
                    f"VocabParallelEmbedding does not support {option}={getattr(embedding, option)}: it "
                    "depends on ids that other ranks hold. Leave this embedding replicated."
                )
        weight, padding_idx = embedding.weight, embedding.padding_idx
        self.group, self.rank, self.world_size = ctx.tp_group, ctx.rank, ctx.world_size
        self.num_embeddings, self.embedding_dim = weight.shape
        layout = layout_of(weight, 0, ctx, type(self).__name__, "the vocabulary dimension")
        if not layout.contiguous(self.num_embeddings):
            raise ValueError(
                f"VocabParallelEmbedding needs one range of ids per rank, each id on one rank, but the table "
                f"of shape {tuple(weight.shape)} is sharded as {layout}."
            )
        self.start, self.stop = layout.expand(self.num_embeddings, self.rank)[0]
        if padding_idx is not None and padding_idx < 0:
            padding_idx += self.num_embeddings
        self.padding_idx = padding_idx
        self.sequence_parallel, self.reduce_output = sequence_parallel, reduce_output
        self.register_parameter("weight", local_parameter(weight, 0, layout, ctx))

    @classmethod
    def from_parameters(
        cls, ctx: ParallelExecutionCtx, weight: torch.Tensor, padding_idx: int | None = None, **flags: bool
    ) -> VocabParallelEmbedding:
        """The layer for this table, which may be sharded or full, without an ``nn.Embedding``."""
        return cls(ctx, EmbeddingParameters(weight, padding_idx), **flags)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The embeddings of token ids."""
        padding = self.padding_idx
        if padding is not None:
            padding = padding - self.start if self.start <= padding < self.stop else None
        if self.stop - self.start == self.num_embeddings:  # all ids are here: a single rank, mostly
            output = _look_up(unwrap(self.weight), input, padding)
        else:
            index, elsewhere = local_ids(input, self.start, self.stop, self.num_embeddings)
            output = _look_up(unwrap(self.weight), index, padding).masked_fill(elsewhere.unsqueeze(-1), 0)
        if not self.reduce_output:
            return output
        if self.sequence_parallel:
            return differentiable_reduce_scatter_sum(output, self.group, SEQUENCE_DIM)
        return differentiable_all_reduce_sum(output, self.group)

    def extra_repr(self) -> str:
        """Sizes, this rank's ids and flags, for ``print(model)``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, ids={self.start}:{self.stop}, "
            f"sequence_parallel={self.sequence_parallel}, reduce_output={self.reduce_output}, "
            f"rank={self.rank}/{self.world_size}"
        )
