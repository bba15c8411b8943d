"""Making the plan of a model: one that the user passes, one from the cache, or one that is searched."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ..capture import capture
from ..capture.cached_properties import compute_cached_properties
from ..capture.dummy.check import check_placeholders
from ..capture.dummy_inputs import example_calls
from ..capture.repeated_blocks import Repeated, find_repeated, without_repeats
from ..capture.trace import install_output_hooks
from ..config import Config
from ..context import ParallelExecutionCtx
from ..distributed.consensus import all_gather_object, on_all_ranks, on_rank0, rank0_only
from ..errors import GraphBreak
from ..graph.local_program import Collective, info_of
from ..passes.build import build_program
from ..passes.solve import Solved, solved_of
from ..solver.constraints import check_names, parse
from ..utils.memory import gc_paused
from ..utils.progress import stage
from ..weights.meta_init import tied_names
from .apply import parameter_shapes, plan_of_user
from .build import PlanBuilder, parameters_of_block, repeat_counts
from .cache import cache_key, cached_plan, plan_key, store_plan
from .plan import Plan

RANK0_TIMEOUT = 600.0
"""Seconds that the other ranks wait for rank 0 to plan a model for them."""


@dataclass(frozen=True)
class NotOneGraph:
    """A model that has to be run to be planned, graph by graph: what breaks its graph."""

    reason: str


@dataclass
class Searched:
    """A plan that was searched, with all that it came from.

    Attributes:
        plan: The plan.
        captured: The graph that was solved, of the first blocks where others repeat them.
        inputs: The inputs that it was captured with.
        solved: Its solution.
        repeated: The blocks that were left out of it.
    """

    plan: Plan
    captured: GraphModule
    inputs: list[Any]
    solved: Solved
    repeated: list[Repeated]


def make_plan(model: nn.Module, ctx: ParallelExecutionCtx, config: Config, examples: Any) -> Plan | NotOneGraph:
    """The plan of a model whose parameters carry metadata; nothing is placed or loaded. A collective."""
    ctx.state.aliases = tied_names(model)
    if config.plan is not None:
        return plan_of_user(config.plan, ctx)
    key = cache_key(model, ctx, config, examples) if ctx.is_first else None
    plan: Plan | NotOneGraph | None = cached_plan(key, ctx)
    if plan is not None:
        return plan
    plan = _planned_on_rank0(model, ctx, config, examples)
    if plan is None:
        found = search_plan(model, ctx, config, examples)
        plan = found.plan if isinstance(found, Searched) else found
    if isinstance(plan, Plan):
        store_plan(key, plan, ctx)
    return plan


def _planned_on_rank0(
    model: nn.Module, ctx: ParallelExecutionCtx, config: Config, examples: Any
) -> Plan | NotOneGraph | None:
    """What rank 0 plans for all ranks; None, on all ranks, if each has to plan by itself.

    Planning uses one core, and ranks often have to share theirs. It has to be the same model for all of them, which can
    be told of transformers' own.
    """
    mine = plan_key(model, ctx, config, examples, code=False)
    answers = all_gather_object(ctx.world_group, mine, "planning the model")
    if mine is None or len(answers) == 1 or set(answers) != {mine}:
        return None

    def search() -> Any:
        with rank0_only():
            found = search_plan(model, ctx, config, examples)
        return found.reason if isinstance(found, NotOneGraph) else found.plan.to_json()

    data = on_rank0(ctx.world_group, search, "planning the model", max(config.sync_timeout, RANK0_TIMEOUT))
    return NotOneGraph(data) if isinstance(data, str) else Plan.from_json(data)


def search_plan(model: nn.Module, ctx: ParallelExecutionCtx, config: Config, examples: Any) -> Searched | NotOneGraph:
    """Capture the model and search for its plan: capture, decompose, solve, annotate, partition.

    A deep model is planned by its first blocks where the others repeat them. A model that is called in several ways
    (with text alone, with images, with audio) is planned by the richest call; parameters that it does not use, by the
    next ones, with the placements of the earlier ones fixed.
    """
    ctx.state.aliases = tied_names(model)
    install_output_hooks(model)  # on all blocks, not only on those that are captured now
    compute_cached_properties(model)
    calls = example_calls(model, examples, ctx.current_device, config.objective)
    shapes, builder = parameter_shapes(ctx), PlanBuilder(ctx.world_size)
    found: Searched | None = None
    broken: NotOneGraph | None = None
    failed: Exception | None = None
    try:
        while shapes.keys() - builder.parameters.keys():
            with on_all_ranks(ctx.world_group, "preparing the plan", config.sync_timeout):
                names = {name: ctx.state.aliases.get(name, [name]) for name in ctx.param_cache}
                check_names(parse(config.constraints), names)
                call = next(calls, None)
                if call is not None and examples is not None:
                    check_placeholders(model, call[1])
            if call is None:
                break
            try:
                captured = _search_call(model, *call, ctx, config)
            except Exception as error:  # on all ranks; of dummy inputs, another call may do
                if examples is not None:
                    raise
                failed = failed or error
                _warn(ctx, call[1], str(error))
                continue
            if isinstance(captured, NotOneGraph):
                broken = broken or captured
                _warn(ctx, call[1], captured.reason)
                continue
            graph, inputs, repeated, collectives = captured
            solved = solved_of(graph)
            builder.add_call(solved, collectives, repeated, shapes)
            ctx.state.decided = {name: p.placement for name, p in builder.parameters.items()}
            found = found or Searched(Plan(ctx.world_size), graph, inputs, solved, repeated)
    finally:
        ctx.state.decided = {}
    if found is None and broken is not None:
        return broken
    if found is None:
        assert failed is not None
        raise failed
    builder.add_unused(shapes)
    if broken is not None and builder.unplanned:  # which that call may use
        builder.breaks.append(f"the model: {broken.reason}")
    return replace(found, plan=builder.build())


def _warn(ctx: ParallelExecutionCtx, inputs: dict[str, Any], reason: str) -> None:
    """Say that a call of the model is not planned."""
    if ctx.rank == 0:
        text = "the call with %s is not planned as one graph: %s"
        logging.getLogger("paraxis").warning(text, ", ".join(inputs) or "these inputs", reason.splitlines()[0])


def _search_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: ParallelExecutionCtx, config: Config
) -> tuple[GraphModule, list[Any], list[Repeated], list[Collective]] | NotOneGraph:
    """The graph of a call with its solution, its inputs, the blocks left out of it, and the collectives it needs."""
    shown = config.show_progress and ctx.rank == 0
    with ctx.timed("capture"), stage("Capturing the model", shown):
        first, repeated = _capture_first_blocks(model, args, kwargs, ctx, config)
        graph = first if first is not None else _capture_model(model, args, kwargs, ctx, config)
    if isinstance(graph, NotOneGraph):
        return graph
    captured, inputs = graph
    state = ctx.state
    state.planning = state.searching = True
    state.repeats = repeat_counts(repeated, ctx.param_cache)
    try:
        with torch.no_grad(), gc_paused(), stage("Searching for a plan", shown):
            program = build_program(captured, inputs, ctx, config)
    finally:
        state.planning = state.searching = False
    return captured, inputs, repeated, list(info_of(program).collectives)


def _capture_first_blocks(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: ParallelExecutionCtx, config: Config
) -> tuple[tuple[GraphModule, list[Any]] | None, list[Repeated]]:
    """The graph of a deep model without the blocks that repeat others, and these; None if there is none."""
    repeated = find_repeated(model) if config.plan_by_blocks else []
    if not _constrained_alike(repeated, config, ctx):
        repeated = []
    graphs: list[tuple[GraphModule, list[Any]]] = []
    failed = "" if repeated else "no blocks"
    try:
        with torch.no_grad(), without_repeats(model, repeated):
            if repeated:
                capture(model, args, kwargs, lambda graph, inputs: graphs.append((graph, inputs)))
    except Exception as error:
        # Whatever a model's own code may raise when blocks are missing. Capturing all of it shows whether that is why.
        failed = f"{type(error).__name__}: {error}"
    if any(all_gather_object(ctx.world_group, failed, "capturing the first blocks", config.sync_timeout)):
        return None, []
    return graphs[0], repeated


def _constrained_alike(repeated: list[Repeated], config: Config, ctx: ParallelExecutionCtx) -> bool:
    """Whether the constraints ask the same of every block as of the one that it repeats."""
    return all(
        constraint.matches([name]) == constraint.matches([each.renamed(name, index)])
        for constraint in parse(config.constraints)
        for each in repeated
        for index in each.like
        for name in parameters_of_block(each, each.like[index], ctx.param_cache)
    )


def _capture_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: ParallelExecutionCtx, config: Config
) -> tuple[GraphModule, list[Any]] | NotOneGraph:
    """The graph of the model, or what breaks it."""
    graphs: list[tuple[GraphModule, list[Any]]] = []
    reason = None
    with on_all_ranks(ctx.world_group, "capturing the model", config.sync_timeout), torch.no_grad():
        try:
            capture(model, args, kwargs, lambda graph, inputs: graphs.append((graph, inputs)))
        except GraphBreak as error:
            reason = str(error)
    reasons = [x for x in all_gather_object(ctx.world_group, reason, "capturing the model", config.sync_timeout) if x]
    return NotOneGraph(reasons[0]) if reasons else graphs[0]
