"""Data parallelism beside tensor parallelism: what the ranks of a mesh's dimension ``dp`` keep, and how they agree.

Every data-parallel rank runs the model on a batch of its own. With ``data_parallel="replicate"`` each keeps all of its
tensor-parallel shards, and gradients are averaged when a backward pass has them. With ``"shard"`` the ranks split the
shards of matrices between them, gradients and optimizer's state too; a shard is gathered inside the program, right
before it is used, and again for the backward pass. Vectors (norms, biases) are small and stay as with ``"replicate"``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from ..config import Config
from ..context import ParallelExecutionCtx
from ..distributed.dp_shard import dp_shard_over
from ..distributed.mesh import HOW
from ..plan import size_text
from ..tensor.sharded_tensor import ShardedTensor, spec_of, unwrap
from .grad_reducer import GradReducer


def check_option(ctx: ParallelExecutionCtx, config: Config) -> None:
    """Raise, on all ranks, if the options ask for data parallelism and there are no ranks for it."""
    if config.data_parallel is not None and ctx.groups.dp is None:
        raise ValueError(
            f"data_parallel={config.data_parallel!r} is for a mesh with a dimension 'dp', and there is none: {HOW}, "
            "and pass it as ParallelExecutionCtx(mesh=...)."
        )


def splits(ctx: ParallelExecutionCtx, config: Config) -> bool:
    """Whether data-parallel ranks split parameters between them."""
    return config.data_parallel == "shard" and ctx.dp_size > 1


def arrange(parameters: Mapping[str, nn.Parameter], ctx: ParallelExecutionCtx, config: Config) -> None:
    """Say of placed parameters which part a rank of the mesh keeps, and see to their gradients. A collective."""
    check_option(ctx, config)
    for parameter in parameters.values():
        _meta(parameter).world_group = ctx.world_group
    if ctx.dp_size == 1:
        return
    _check_same_places(parameters, ctx)
    assert ctx.mesh is not None and ctx.groups.dp is not None
    if ctx.grad_reducer is None:
        ctx.grad_reducer = GradReducer(ctx.groups.dp, _local, _gradient)
    for parameter in parameters.values():
        meta = _meta(parameter)
        meta.grad_reducer = ctx.grad_reducer
        if splits(ctx, config):
            meta.split = dp_shard_over(meta.name, meta.placement, meta.shape, ctx.groups, ctx.mesh)
        if meta.split is None:
            ctx.grad_reducer.add(parameter)
    if ctx.plan is not None:
        ctx.plan.data_parallel = _in_words(ctx, config)


def include(tensors: Sequence[Any], ctx: ParallelExecutionCtx) -> None:
    """See to the gradients of parameters that have been added to a model since it was made parallel (adapters)."""
    if ctx.grad_reducer is not None:
        for value in tensors:
            if isinstance(value, nn.Parameter) and not isinstance(value, ShardedTensor):
                ctx.grad_reducer.add(value)


def _check_same_places(parameters: Mapping[str, nn.Parameter], ctx: ParallelExecutionCtx) -> None:
    """Data-parallel ranks exchange shards, so their plans must be the same."""
    from ..distributed.consensus import all_gather_object  # which comes with those that call this

    text = "\n".join(f"{name} {_meta(p).placement}" for name, p in sorted(parameters.items()))
    mine = hashlib.sha256(text.encode()).hexdigest()
    found = all_gather_object(ctx.world_group, mine, "comparing the plans of data-parallel ranks")
    differing = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    if differing:
        raise RuntimeError(
            f"the ranks of the mesh have made different plans: rank {differing[0]} has not that of rank 0. Give all of "
            "them the same model, options and example inputs, or one plan (plan=)."
        )


def _in_words(ctx: ParallelExecutionCtx, config: Config) -> str:
    known = [_meta(p) for p in ctx.param_cache.values() if isinstance(p, ShardedTensor)]
    if not splits(ctx, config):
        return f"{ctx.dp_size} data-parallel ranks, each with all shards; gradients are averaged"
    whole = [meta for meta in known if meta.split is None]
    size = sum(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in whole)
    return (
        f"{ctx.dp_size} data-parallel ranks, which split {len(known) - len(whole)} parameters between them; "
        f"{len(whole)} that are small ({size_text(size)}) stay on each"
    )


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Within, backward passes leave gradients as this rank has them; the next one outside averages all of it.

    For gradients that are added up over several batches: one average is enough. What data-parallel ranks split is
    averaged in every pass all the same, since no rank has room for all of it.
    """
    found = next((p._spec.grad_reducer for p in model.parameters() if isinstance(p, ShardedTensor)), None)  # type: ignore[union-attr]
    with found.paused() if found is not None else nullcontext():
        yield


def gather_when_used(graph: Graph) -> None:
    """Move the gathering of every parameter to right before its first use, so that few are there at a time."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if n.target is unwrap]:
        users = sorted(node.users, key=lambda user: order[user])
        if users:
            users[0].prepend(node)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local.detach() if isinstance(tensor, ShardedTensor) else tensor.detach()


def _gradient(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    return ShardedTensor(local, spec_of(parameter), parameter.shape) if isinstance(parameter, ShardedTensor) else local


def _meta(parameter: nn.Parameter) -> Any:
    return parameter._spec  # type: ignore[attr-defined]
