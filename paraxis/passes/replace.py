"""Replacing: from the solution to the local program of this rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule

from ..compat.host_functions import HOST_FUNCTION
from ..compat.torch import OpOverload
from ..config import Config
from ..context import ParallelExecutionCtx
from ..graph.local_program import info_of
from ..graph.nodes import module_of
from ..solver import Value
from .base import PassBase
from .partition import Partitioner
from .solve import Solved, solved_of


class ParallelLayerReplacePass(PassBase):
    """The captured global program becomes the local program of this rank.

    Linear layers, embeddings and the loss become parallel layers, every edge whose placements differ a redistribution,
    and constant sizes (a number of heads in a view) become local. Layers come from ``ctx.parallel_layer_cache``, so
    that no parameter is created twice. While a plan is searched, parameters have no placement yet: layers stay
    operators, and the program shows the collectives of the plan.
    """

    name = "replace"

    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """Partition the graph. What later passes need is in ``meta`` (:mod:`paraxis.graph.local_program`)."""
        solved = solved_of(graph_module)
        with ctx.timed("rewrite"):
            program = Partitioner(solved, ctx, grad=torch.is_grad_enabled()).run()
        info = info_of(program)
        info.fingerprint = _fingerprint(solved)
        info.inputs = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
        known = [(node.meta["origin"].target, p) for node, p in solved.parameters.items() if p.meta is not None]
        info.parameters = {target: ctx.param_cache[p.name] for target, p in known if p.name in ctx.param_cache}
        trained = [p for _, p in known if p.name in ctx.param_cache and ctx.param_cache[p.name].requires_grad]
        info.constants = _constants(solved)
        if torch.is_grad_enabled():
            info.constants += [f"the gradient of {p.name}" for p in trained]
        return program


def _fingerprint(solved: Solved) -> list[str]:
    """What must be the same on all ranks, in any order: placements, and operators with their shapes."""
    placements = {p.name: str(solved.solution.parameters.get(Value(n))) for n, p in solved.parameters.items()}
    shapes = sorted(
        f"{_target(step.call.target)} {[tuple(map(str, t.shape)) for t in (*step.call.inputs, *step.call.outputs)]}"
        for step in solved.program.steps
        if step.call is not None
    )
    results = [str(p) for p in solved.solution.results]
    return [*(f"{n} {p}" for n, p in sorted(placements.items())), *shapes, *results]


def _constants(solved: Solved) -> list[str]:
    """The operators with the numbers, words and types that they are called with.

    Not those of host functions: each process numbers its own.
    """
    return [
        f"{_target(step.call.target)}({', '.join(plain)}) in {module_of(step.node) or 'the model'}"
        for step in solved.program.steps
        if step.call is not None
        and step.call.target is not HOST_FUNCTION
        and (plain := _plain([*step.call.args, *step.call.kwargs.values()]))
    ]


def _plain(values: Iterable[Any]) -> list[str]:
    """The plain values in these, and in lists and tuples of them, as text."""
    found: list[str] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += _plain(value)
        elif isinstance(value, (bool, int, float, complex, str, torch.dtype)):
            found.append(repr(value))
    return found


def _target(target: object) -> str:
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", "")
