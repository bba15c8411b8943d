"""Parameters that a model gets after it was planned: those of adapters, mostly.

A plain parameter with a new name is replicated, with the values of rank 0 and the gradient that it has in the unsharded
model. A copy of a sharded parameter under a new name (a module that was copied to
be trained) keeps the placement of the original. What was planned is never replaced: a parameter under a known name that
is not the one that was planned is refused when the graph is solved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import Config
from ..context import ParallelExecutionCtx
from ..distributed.collectives import broadcast
from ..distributed.consensus import all_gather_object
from ..placement import REPLICATE
from ..plan.build import PlanBuilder
from ..tensor.sharded_tensor import ShardedTensor

REASON = "added after the plan was made: replicated"


def register_late_parameters(module: nn.Module, prefix: str, ctx: ParallelExecutionCtx, config: Config) -> None:
    """Take up the parameters of ``module`` (called ``prefix`` in the model) that the plan does not know. A collective.

    Raises:
        RuntimeError: on all ranks, if they do not have the same new parameters, or compile another module: one of them
            has hooks that the others do not have.
    """
    if ctx.plan is None or ctx.state.planning:
        return
    known = set(ctx.param_cache).union(*ctx.state.aliases.values())
    planned = set(map(id, ctx.param_cache.values()))
    new: dict[str, nn.Parameter] = {}
    for path, parameter in module.named_parameters():
        name = f"{prefix}.{path}" if prefix else path
        if name not in known and id(parameter) not in planned:
            new[name] = parameter
    described = [[name, list(p.shape), str(p.dtype), isinstance(p, ShardedTensor)] for name, p in new.items()]
    compiling = all_gather_object(ctx.tp_group, [prefix, described], "compiling the model", config.sync_timeout)
    modules, answers = zip(*compiling, strict=True)
    other = next((rank for rank, theirs in enumerate(answers) if theirs != answers[0]), None)
    if other is not None:
        raise RuntimeError(
            f"the ranks do not have the same parameters: since the model was planned, rank 0 got {_names(answers[0])} "
            f"and rank {other} got {_names(answers[other])}. Change the model alike on every rank."
        )
    if len(set(modules)) > 1:
        named = [name or "the model" for name in modules]
        raise RuntimeError(
            "the ranks do not compile the same program: "
            f"{', '.join(f'rank {i} that of {name}' for i, name in enumerate(named))}. "
            "Register and remove hooks, and patch modules, alike on every rank."
        )
    if not new:
        return
    builder = PlanBuilder.of(ctx.plan, ctx.world_size)
    for name, parameter in new.items():
        if isinstance(parameter, ShardedTensor):
            parameter.spec.name = name  # type: ignore[union-attr]
            builder.add_parameter(name, parameter.placement, parameter.shape)
            if ctx.state.grad_reducer is not None and parameter.dp_shard is None:
                ctx.state.grad_reducer.add(parameter)
        else:
            builder.add_parameter(name, REPLICATE, parameter.shape, REASON)
            with torch.no_grad():
                parameter.copy_(_from_the_first(parameter.detach(), ctx))
        ctx.param_cache[name] = parameter
    ctx.plan = builder.build()


def _from_the_first(tensor: torch.Tensor, ctx: ParallelExecutionCtx) -> torch.Tensor:
    alone = dist.get_world_size(ctx.world_group) == 1
    return tensor if alone else broadcast(tensor.contiguous().clone(), ctx.world_group)


def _names(described: list[list[Any]]) -> str:
    names = [name for name, *_ in described]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
