"""The ``torch.compile`` backend, and how the ranks keep in step when they compile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import nn
from torch.fx import GraphModule

from .capture.trace import CaptureError, describe, fresh_entry, ignore_loggers
from .core import Config, ParallelExecutionCtx
from .passes import AnalyzeBase, InitializeOrLoadWeightsPass, build_parallel_pass_pipeline
from .passes.solve import RESULT, Solved
from .sharded import ShardedTensor
from .weights.agree import exchange, together

RECOMPILE_LIMIT = 64
"""Prefill, decode, training and their dynamic variants are all compilations of one function."""


def parallelize_backend(
    graph_module: GraphModule, example_inputs: list[Any], ctx: ParallelExecutionCtx, config: Config
) -> Callable[..., Any]:
    """A backend for ``torch.compile``: run the pass pipeline on a captured graph and return the local program.

    Use it as ``torch.compile(model, fullgraph=True, backend=partial(parallelize_backend, ctx=ctx, config=config))``
    on a model whose parameters carry :class:`~paraxis.core.ParameterMeta`; :func:`parallelize_model` does all that.
    """
    local = run_pipeline(graph_module, example_inputs, ctx, config)
    ctx.compile_times += 1
    return local


def run_pipeline(
    graph_module: GraphModule, example_inputs: list[Any], ctx: ParallelExecutionCtx, config: Config
) -> GraphModule:
    """The passes, with all ranks agreeing on the graph before weights are read or collectives run."""
    ctx.example_inputs = example_inputs
    passes = list(config.pipeline or build_parallel_pass_pipeline())
    captured = graph_module
    loading = next((i for i, p in enumerate(passes) if isinstance(p, InitializeOrLoadWeightsPass)), len(passes))
    with together(ctx.tp_group, "compiling the model", config.sync_timeout):
        for step in passes[:loading]:
            graph_module = step(graph_module, ctx=ctx, config=config)
    _compare_graphs(ctx, config, _digest(captured), _summary(example_inputs))
    for step in passes[loading:]:
        graph_module = step(graph_module, ctx=ctx, config=config)
    if config.clean_markers_after_all_passes:
        for step in passes:
            if isinstance(step, AnalyzeBase):
                step.clean_all(captured)
    ctx.last_optimized_graph_module = graph_module
    return graph_module


def compiled_call(model: nn.Module, ctx: ParallelExecutionCtx, config: Config) -> Callable[..., Any]:
    """What ``model(...)`` runs from now on."""
    ignore_loggers()
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    backend = partial(parallelize_backend, ctx=ctx, config=config)
    compiled = torch.compile(fresh_entry(config.gather_outputs), fullgraph=True, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(model, *args, **kwargs)
        except dynamo.exc.BackendCompilerFailed as error:
            inner = error.inner_exception
            raise inner if isinstance(inner, Exception) else error from None
        except dynamo.exc.Unsupported as error:
            raise CaptureError(describe(error, model)) from error

    return call


# -- agreement of the ranks ----------------------------------------------------------------------------------------


def _digest(graph_module: GraphModule) -> str:
    """A fingerprint of the captured program and its solution: equal on all ranks, or they must not run it."""
    solved: Solved = graph_module.meta[RESULT]
    lines = []
    for step in solved.program.steps:
        if step.call is None:
            lines.append(str([str(p) for p in solved.solution.results]))
            continue
        strategy = solved.solution.strategies[step]
        shapes = [tuple(map(str, t.shape)) for t in (*step.call.inputs, *step.call.outputs)]
        placements = [str(p) for p in (*strategy.inputs, *strategy.outputs)]
        target = step.call.target
        name = target if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "")
        lines.append(f"{name} {shapes} {placements}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _summary(example_inputs: list[Any]) -> str:
    """The inputs of the graph, less the parameters, in words."""
    shown = [x for x in example_inputs if not isinstance(x, nn.Parameter)]
    return ", ".join(
        f"{tuple(x.shape)}{' sharded' if isinstance(x, ShardedTensor) else ''}"
        if isinstance(x, torch.Tensor)
        else str(x)
        for x in shown[:6]
    )


def _compare_graphs(ctx: ParallelExecutionCtx, config: Config, digest: str, summary: str) -> None:
    """Raise on all ranks if they did not compile the same graph: its collectives would wait for one another forever."""
    answers = exchange(ctx.tp_group, [digest, summary], "comparing the compiled graphs", config.sync_timeout)
    if len({digest for digest, _ in answers}) > 1:
        described = "; ".join(f"rank {rank}: {inputs}" for rank, (_, inputs) in enumerate(answers))
        raise RuntimeError(
            f"rank {ctx.rank} of {ctx.world_size}: the ranks compiled different graphs, whose collectives would wait "
            f"for one another forever. Inputs on {described}. Every rank must call the model with inputs of the same "
            "shapes and in the same mode."
        )
