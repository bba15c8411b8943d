"""The ``torch.compile`` backend: from a captured graph to what runs it on this rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..config import AUTO, Config
from ..context import ParallelExecutionCtx
from ..data_parallel.replicate import reduce_late_parameters
from ..data_parallel.shard import shards_parameters
from ..distributed.collectives import meet
from ..distributed.consensus import all_gather_object, on_all_ranks
from ..graph.local_program import draws_random, info_of
from ..graph.python_calls import with_python_calls
from ..passes.build import build_program
from ..passes.lift import LIFTED, lifted_of
from ..passes.setting import compiles, obstacle
from ..passes.solve import solved_of
from ..plan.apply import apply_plan, parameter_shapes
from ..plan.build import PlanBuilder
from ..tensor.unshard import reshard_after_forward
from ..utils.progress import stage
from ..weights.materialize import materialize_parameters
from .block_programs import BlockPrograms, NotRepeated, OutlineOfCall
from .inductor import compile_program, run_outlined, run_uncompiled

logger = logging.getLogger("paraxis")


def parallelize_backend(
    graph_module: GraphModule,
    example_inputs: list[Any],
    ctx: ParallelExecutionCtx,
    config: Config,
    blocks: BlockPrograms | None = None,
    name: str = "",
) -> Callable[..., Any]:
    """A backend for ``torch.compile``: run the pass pipeline on a captured graph and return the local program.

    Use it as ``torch.compile(model, fullgraph=True, backend=partial(parallelize_backend, ctx=ctx, config=config))``
    on a model whose parameters carry :class:`~paraxis.ParameterMeta`; :func:`parallelize_model` does all that. With
    ``blocks``, the graph is that of a model's first blocks, and the program runs all of them. With ``name``, it is that
    of this module of the model.
    """
    shown = config.show_progress and ctx.is_first
    with stage("Preparing the program for new inputs", shown and not ctx.state.planning):
        ctx.state.first_blocks = blocks is not None
        try:
            program = build_program(graph_module, example_inputs, ctx, config)
        finally:
            ctx.state.first_blocks = False
    if ctx.plan is None or ctx.state.planning:
        extend_plan(graph_module, program, ctx, config, name)
    ctx.compile_times += 1
    reduce_late_parameters(example_inputs, ctx)
    outline = _outlined(program, example_inputs, ctx, config, blocks) if blocks is not None else None
    if compiles(ctx, config):
        runnable = _compiled(program, ctx, config, shown, outline)
    else:
        runnable = run_outlined(program, outline) if outline is not None else with_python_calls(program)
    return reshard_after_forward(runnable) if shards_parameters(ctx, config) else runnable


def extend_plan(
    captured: GraphModule, program: GraphModule, ctx: ParallelExecutionCtx, config: Config, name: str = ""
) -> None:
    """Write down what was decided for a graph that no plan covers: one of a model that is planned by running it, or
    of one that is compiled without :func:`parallelize_model`."""
    builder = PlanBuilder.of(ctx.plan, ctx.world_size)
    source = program.meta[LIFTED].source if LIFTED in program.meta else program
    builder.add_part(name, solved_of(captured), info_of(source).collectives)
    if ctx.state.planning:  # there are more graphs to come
        ctx.plan = builder.build()
        return
    builder.add_unused(parameter_shapes(ctx))
    apply_plan(builder.build(), ctx)
    materialize_parameters(ctx, config)


def _outlined(
    program: GraphModule,
    example_inputs: list[Any],
    ctx: ParallelExecutionCtx,
    config: Config,
    blocks: BlockPrograms,
) -> OutlineOfCall:
    """The outline of a program of the first blocks; :class:`NotRepeated` on all ranks if one rank has none."""
    found: OutlineOfCall | None = None
    why = ""
    try:
        if draws_random(program):
            raise NotRepeated("it draws random numbers")
        found = blocks.outline(program, example_inputs)
    except NotRepeated as error:
        why = str(error)
    reasons = all_gather_object(ctx.tp_group, why, "compiling the model", config.sync_timeout)
    why = next(filter(None, reasons), "")
    if found is None or why:
        raise NotRepeated(why)
    return found


def _compiled(
    program: GraphModule, ctx: ParallelExecutionCtx, config: Config, shown: bool, blocks: OutlineOfCall | None = None
) -> Callable[..., Any]:
    """The program compiled by Inductor, all ranks together; without it where that cannot be."""
    if draws_random(program):
        logger.info("a graph with random draws (dropout) is not compiled by Inductor")
        return run_uncompiled(program)
    if (config.mode is not None or config.compile == AUTO) and (why := obstacle(ctx, config)):
        say_once(f"no CUDA graphs: {why}", ctx)
    source = lifted_of(program).source

    def together(compiling: Callable[[], Any]) -> Any:
        """Compile on all ranks; used when the program runs for the second time."""
        try:
            meet(ctx.tp_group, ctx.current_device)
            with on_all_ranks(ctx.tp_group, "compiling the local program"), stage("Compiling with Inductor", shown):
                return compiling()
        except Exception as error:
            say_once(f"Inductor cannot compile a graph, which runs eagerly: {_reason(error)}", ctx)
            raise

    meet(ctx.tp_group, ctx.current_device)
    try:
        with on_all_ranks(ctx.tp_group, "compiling the local program"), stage("Compiling with Inductor", shown):
            return compile_program(program, ctx, config, blocks, together if config.compile == AUTO else None)
    except Exception as error:
        data_dependent = isinstance(error, GuardOnDataDependentSymNode)  # an operator looks at its data in Python
        if not data_dependent and config.compile != AUTO:
            raise
        if blocks is not None:
            raise NotRepeated(_reason(error)) from error
        say_once(f"Inductor cannot compile a graph, which runs eagerly: {_reason(error)}", ctx)
        return run_uncompiled(source)


def _reason(error: BaseException) -> str:
    """What an error says first, or what has caused it on another rank."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if line.startswith("Caused by")), lines[0])


def say_once(message: str, ctx: ParallelExecutionCtx) -> None:
    """Warn of what makes programs slower than they could be; once, and on one rank."""
    if ctx.is_first:
        _warn(message)


@lru_cache(maxsize=64)
def _warn(message: str) -> None:
    logger.warning(message)
