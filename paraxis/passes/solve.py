"""Solving: from a captured graph to a placement for every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch.fx import GraphModule, Node

from ..capture import mark_output_op, simplify, to_aten
from ..config import Config
from ..context import ParallelExecutionCtx
from ..placement import REPLICATE, Replicate
from ..rules import Strategy
from ..solver import (
    Account,
    Candidates,
    CostModel,
    Encoded,
    Program,
    Requirements,
    Solution,
    Step,
    account,
    machine_of,
    on_one_rank,
    solve,
)
from ..solver.constraints import parse
from .base import AnalyzeBase
from .parameters import ParameterInput, find_parameters, sharded_inputs

RESULT = "paraxis_solution"
"""In ``graph_module.meta`` of a captured graph: its :class:`Solved`."""


@dataclass(eq=False)
class Solved:
    """The captured graph as ATen operators, its solution, and what it was solved with."""

    aten: GraphModule
    program: Program
    solution: Solution
    candidates: Candidates
    parameters: dict[Node, ParameterInput] = field(default_factory=dict)
    """By node of the ATen graph."""
    keep_sharded: bool = True
    model: CostModel = field(default_factory=CostModel)
    account: Account = field(default_factory=Account)


def solved_of(graph_module: GraphModule) -> Solved:
    """The result of :class:`ParallelAxisSolverPass` on a captured graph."""
    solved = graph_module.meta.get(RESULT)
    if not isinstance(solved, Solved):
        raise RuntimeError("this graph has no solution: run ParallelAxisSolverPass first")
    return solved


class ParallelAxisSolverPass(AnalyzeBase):
    """Find the cheapest placement of every tensor in the graph.

    The pass decomposes the captured graph to ATen operators, whose rules say how placements propagate, and searches
    (:mod:`paraxis.solver.search`). Parameters that are placed already keep their placement. The captured graph itself
    does not change: the result is stored in its ``meta`` for later passes, and the placement of every captured node in
    the node's marker (field ``placement``).

    It does not decide *whether* to parallelize, or over how many ranks.
    """

    name = "solve"

    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """Decompose, search, and store the solution in the graph's ``meta``."""
        captured = find_parameters(graph_module, ctx)
        self._check_known(captured, ctx)
        with ctx.timed("decompose"):
            aten = simplify(to_aten(graph_module))
        by_origin = {p.node: p for p in captured}
        parameters: dict[Node, ParameterInput] = {}
        fixed = {}
        caches = sharded_inputs(graph_module)
        alone = ctx.world_size == 1  # solved for two ranks, of which one then has both shards
        later = ctx.plan is not None and not ctx.state.planning
        for node in aten.graph.nodes:
            if node.op not in ("placeholder", "get_attr"):
                continue
            origin = node.meta.get("origin")
            if origin in by_origin:
                parameters[node] = by_origin[origin]
                placement = by_origin[origin].placement or ctx.state.decided.get(by_origin[origin].name)
                if later and by_origin[origin].meta is None:  # added since the plan was made
                    placement = REPLICATE
                if placement is not None and not alone:
                    fixed[node] = placement
            elif origin in caches and not alone:
                fixed[node] = caches[origin]
        names = {node: p.name for node, p in parameters.items()}
        marked = any(n.target is mark_output_op for n in aten.graph.nodes)
        world = max(ctx.world_size, 2)
        program = Program(aten, names, fixed, world, encodings_of(parameters))
        keep = marked or not config.gather_outputs
        model = cost_model(ctx, config, world)
        required = Requirements(
            parse(config.constraints),
            ctx.state.aliases,
            None if alone else config.memory_limit,
            dict(ctx.state.repeats),
        )
        with ctx.timed("search"):
            solution, candidates = solve(
                program, model, required, keep_sharded=keep, sequence=bool(config.enable_sequence_parallel)
            )
        spent = account(program, solution, replace(model, world=1) if alone else model)
        if alone:  # it computes both shards, and sends nothing
            solution, plain = on_one_rank(solution), model.without_prices()
            spent.compute = {
                step: plain.run(step.call, solution.strategies[step]) for step in spent.compute if step.call
            }
            spent.work = {step: (flops, 1.0) for step, (flops, _) in spent.work.items()}
        solved = Solved(aten, program, solution, candidates, parameters, keep, model, spent)
        graph_module.meta[RESULT] = solved
        self._mark(solution.strategies, graph_module)
        return graph_module

    def _check_known(self, captured: list[ParameterInput], ctx: ParallelExecutionCtx) -> None:
        """Raise if the model has a parameter that was not there when it was planned."""
        if ctx.plan is None or ctx.state.planning:
            return
        unknown = [p for p in captured if p.name not in ctx.param_cache or (p.meta and p.placement is None)]
        unknown += [p for p in captured if p not in unknown and _is_replaced(p, ctx.param_cache.get(p.name))]
        if unknown:
            changed = ", ".join(f"{p.name} {p.shape}" for p in unknown[:8])
            raise RuntimeError(
                f"illegal path for recompilation: the model now has parameters that the plan does not know: {changed}. "
                "Parameters are created and placed once, by parallelize_model; change the model before that call, or "
                "call parallelize_model again on the changed model."
            )

    def _mark(self, strategies: dict[Step, Strategy], graph_module: GraphModule) -> None:
        """Store the placements of captured nodes in their markers."""
        self.clean_all(graph_module)
        for step, strategy in strategies.items():
            origin = step.node.meta.get("origin")
            outputs = strategy.outputs
            if origin is not None and outputs:
                origin.meta[self.meta_key()] = {
                    "placement": outputs[0],
                    "parallel": not isinstance(outputs[0], Replicate),
                }


def encodings_of(parameters: Mapping[Node, ParameterInput]) -> dict[Node, Encoded]:
    """What the solver has to know of the parameters that are quantized."""
    found = {}
    for node, parameter in parameters.items():
        weight = parameter.meta.quantized if parameter.meta is not None else None
        if weight is not None:
            found[node] = Encoded(weight.nbytes(REPLICATE, 0) / max(prod(weight.shape), 1), weight.units)
    return found


def cost_model(ctx: ParallelExecutionCtx, config: Config, world: int) -> CostModel:
    """The costs that a graph is solved with."""
    backward = config.objective == "training" and (ctx.state.planning or torch.is_grad_enabled())
    model = CostModel.on(machine_of(config.machine), world, backward=backward)
    return replace(model, unscattered=0.0) if config.enable_sequence_parallel == "auto" else model


def _is_replaced(found: ParameterInput, known: object) -> bool:
    """Whether the model's parameter of this name is another one than was planned."""
    return getattr(known, "_spec", found.meta) is not found.meta
