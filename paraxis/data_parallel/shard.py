"""FSDP: which part of a shard a data-parallel rank stores, and when a program unshards it.

Gradients need no hooks here: the gradient of unsharding is a reduce-scatter (see :mod:`paraxis.tensor.unshard` and
:class:`~paraxis.distributed.dp_shard.DPShard`).
"""

from __future__ import annotations

from torch.fx import GraphModule

from ..config import Config
from ..context import ParallelExecutionCtx
from ..distributed.dp_shard import make_dp_shard
from ..tensor.parameter_meta import ParameterMeta
from ..tensor.sharded_tensor import unwrap


def shards_parameters(ctx: ParallelExecutionCtx, config: Config) -> bool:
    """Whether data-parallel ranks shard parameters."""
    return config.data_parallel == "shard" and ctx.dp_size > 1


def shard_over_dp(meta: ParameterMeta, ctx: ParallelExecutionCtx) -> None:
    """Set which part of a placed parameter every data-parallel rank stores; small ones stay replicated."""
    assert ctx.mesh is not None and meta.placement is not None
    meta.dp_shard = make_dp_shard(meta.name, meta.placement, meta.shape, ctx.groups, ctx.mesh)


def unshard_at_first_use(program: GraphModule) -> None:
    """Move the unsharding of every parameter right before its first use, so that few are unsharded at a time."""
    graph = program.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if n.target is unwrap]:
        users = sorted(node.users, key=lambda user: order[user])
        if users:
            users[0].prepend(node)
    program.recompile()
