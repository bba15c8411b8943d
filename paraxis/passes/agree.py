"""Agreeing: all ranks run the same program, or none does."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ..config import Config
from ..context import ParallelExecutionCtx
from ..distributed.consensus import all_gather_object
from ..graph.local_program import info_of
from ..tensor.sharded_tensor import ShardedTensor
from .base import PassBase


class AgreeOnProgramPass(PassBase):
    """All ranks compare their programs, and raise together if they differ: collectives would wait forever.

    Layers, redistributions and random draws must be the same, in the same order. So must the numbers that operators are
    called with: attributes of modules that differ between ranks give every rank garbage. The order of other operators
    may differ: a model that iterates over a set of strings does so in another order in every process.
    """

    name = "agree"
    changes_graph = False

    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """Raise on all ranks if they did not build the same program."""
        group = ctx.world_group if ctx.state.planning else ctx.tp_group
        constants = sorted(info_of(graph_module).constants)
        mine = [_digest(graph_module), _describe(ctx.example_inputs), _hash(constants)]
        answers = all_gather_object(group, mine, "comparing the compiled graphs", config.sync_timeout)
        if len({digest for digest, _, _ in answers}) > 1:
            described = "; ".join(f"rank {rank}: {inputs}" for rank, (_, inputs, _) in enumerate(answers))
            raise RuntimeError(
                f"rank {ctx.rank} of {ctx.world_size}: the ranks compiled different graphs, whose collectives would "
                f"wait for one another forever. Inputs on {described}. Every rank must call the model with inputs of "
                "the same shapes and in the same mode."
            )
        if len({of_constants for _, _, of_constants in answers}) > 1:
            theirs = all_gather_object(group, constants, "comparing the numbers of the graphs", config.sync_timeout)
            shared = set.intersection(*map(set, theirs))
            described = "; ".join(
                f"rank {rank}: {', '.join(sorted(set(lines) - shared)[:3]) or 'none of these'}"
                for rank, lines in enumerate(theirs)
            )
            raise RuntimeError(
                f"rank {ctx.rank} of {ctx.world_size}: the ranks compute different things: {described}. Give the "
                "model, its configuration, the modules' attributes and requires_grad the same values on every rank."
            )
        return graph_module


def _digest(program: GraphModule) -> str:
    """A hash of all that must be the same on all ranks."""
    info = info_of(program)
    lines = [*info.order, *(f"{c.kind} {c.module}" for c in info.collectives), *info.fingerprint]
    return _hash(lines)


def _hash(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _describe(example_inputs: list[Any]) -> str:
    """The first inputs of the graph that are no parameters, in words."""
    shown = [x for x in example_inputs if not isinstance(x, nn.Parameter)]
    return ", ".join(
        f"{tuple(x.shape)}{' sharded' if isinstance(x, ShardedTensor) else ''}"
        if isinstance(x, torch.Tensor)
        else str(x)
        for x in shown[:6]
    )
