"""Set up data parallelism beside tensor parallelism: check the option, distribute the parameters, reduce gradients.

Every data-parallel rank runs the model on a batch of its own. With ``data_parallel="replicate"`` (DDP, see
:mod:`.replicate`) each stores all of its tensor-parallel shards, and gradients are all-reduced during the backward
pass. With ``"shard"`` (FSDP, see :mod:`.shard`) the ranks divide the shards of matrices between them, the gradients and
the optimizer's state too. Vectors (norms, biases) are small and stay replicated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from ..config import Config
from ..context import ParallelExecutionCtx
from ..distributed.consensus import all_gather_object
from ..distributed.mesh import MESH_HINT
from ..tensor.parameter_meta import ParameterMeta
from ..tensor.sharded_tensor import ShardedTensor
from ..utils.sizes import size_text
from .replicate import grad_reducer_of
from .shard import shard_over_dp, shards_parameters


def check_option(ctx: ParallelExecutionCtx, config: Config) -> None:
    """Raise, on all ranks, if the options ask for data parallelism and the mesh has no ranks for it."""
    if config.data_parallel is not None and ctx.groups.dp is None:
        raise ValueError(
            f"data_parallel={config.data_parallel!r} needs a mesh with a dimension 'dp', and there is none: "
            f"{MESH_HINT}, and pass it as ParallelExecutionCtx(mesh=...)."
        )


def setup_data_parallel(parameters: Mapping[str, nn.Parameter], ctx: ParallelExecutionCtx, config: Config) -> None:
    """Set on placed parameters which part a data-parallel rank stores, or have their gradients reduced. A collective.

    Args:
        parameters: Sharded parameters with a placement, by name.
        ctx: The ranks; remembers the gradient reduction, and its plan gets a line about data parallelism.
        config: ``data_parallel`` says which kind.
    """
    check_option(ctx, config)
    for parameter in parameters.values():
        _meta(parameter).world_group = ctx.world_group
    if ctx.dp_size == 1:
        return
    _check_same_placements(parameters, ctx)
    reducer = grad_reducer_of(ctx)
    for parameter in parameters.values():
        meta = _meta(parameter)
        meta.grad_reducer = reducer
        if shards_parameters(ctx, config):
            shard_over_dp(meta, ctx)
        if meta.dp_shard is None:
            reducer.add(parameter)
    if ctx.plan is not None:
        ctx.plan = replace(ctx.plan, data_parallel=_describe(ctx, config))


def _check_same_placements(parameters: Mapping[str, nn.Parameter], ctx: ParallelExecutionCtx) -> None:
    """Data-parallel ranks exchange shards, so their plans must be the same."""
    text = "\n".join(f"{name} {_meta(p).placement}" for name, p in sorted(parameters.items()))
    mine = hashlib.sha256(text.encode()).hexdigest()
    found = all_gather_object(ctx.world_group, mine, "comparing the plans of data-parallel ranks")
    differing = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    if differing:
        raise RuntimeError(
            f"the ranks of the mesh have made different plans: that of rank {differing[0]} is not that of rank 0. Pass "
            "the same model, options and example inputs on all of them, or the same plan (plan=)."
        )


def _describe(ctx: ParallelExecutionCtx, config: Config) -> str:
    """The plan's line about data parallelism."""
    metas = [_meta(p) for p in ctx.param_cache.values() if isinstance(p, ShardedTensor)]
    if not shards_parameters(ctx, config):
        return f"{ctx.dp_size} data-parallel ranks with replicated parameters, whose gradients are all-reduced"
    replicated = [meta for meta in metas if meta.dp_shard is None]
    size = sum(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in replicated)
    return (
        f"{ctx.dp_size} data-parallel ranks that shard {len(metas) - len(replicated)} parameters; "
        f"{len(replicated)} small ones ({size_text(size)}) are replicated"
    )


def _meta(parameter: nn.Parameter) -> ParameterMeta:
    meta = parameter.spec  # type: ignore[attr-defined]
    assert isinstance(meta, ParameterMeta)
    return meta
