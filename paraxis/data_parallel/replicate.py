"""DDP: parameters that every data-parallel rank stores, and the reduction of their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..context import ParallelExecutionCtx
from ..tensor.sharded_tensor import ShardedTensor, spec_of
from .grad_reducer import GradReducer


def grad_reducer_of(ctx: ParallelExecutionCtx) -> GradReducer:
    """The gradient reduction of a mesh with data-parallel ranks, created on first use."""
    if ctx.state.grad_reducer is None:
        assert ctx.groups.dp is not None
        ctx.state.grad_reducer = GradReducer(ctx.groups.dp, _local, _gradient)
    return ctx.state.grad_reducer


def reduce_late_parameters(tensors: Sequence[Any], ctx: ParallelExecutionCtx) -> None:
    """Reduce also the gradients of parameters (adapters) that were added after the model was parallelized."""
    if ctx.state.grad_reducer is not None:
        for value in tensors:
            if isinstance(value, nn.Parameter) and not isinstance(value, ShardedTensor):
                ctx.state.grad_reducer.add(value)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward passes accumulate gradients locally; the first one outside reduces their sum.

    For gradient accumulation over several batches: one reduction is enough. Parameters that data-parallel ranks shard
    are reduced in every pass nevertheless, since no rank has memory for the full gradient.
    """
    found = next((p.spec.grad_reducer for p in model.parameters() if isinstance(p, ShardedTensor)), None)  # type: ignore[union-attr]
    with found.paused() if found is not None else nullcontext():
        yield


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.local.detach() if isinstance(tensor, ShardedTensor) else tensor.detach()


def _gradient(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    return ShardedTensor(local, spec_of(parameter), parameter.shape) if isinstance(parameter, ShardedTensor) else local
