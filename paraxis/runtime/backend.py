"""The ``torch.compile`` backend, and how the ranks keep in step when they compile."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..capture import CaptureError, GraphBreak
from ..capture.dynamic_shapes import mark_dynamic, mark_static
from ..capture.trace import fresh_entry, gc_paused, ignore_loggers, install_output_hooks, no_mha_fastpath, translated
from ..config import Config
from ..context import ParallelExecutionCtx
from ..data_parallel.setup import gather_when_used, include, splits
from ..distributed.collectives import meet
from ..distributed.consensus import all_gather_object, on_all_ranks
from ..optimize.activation_checkpointing import recompute
from ..optimize.cpu_attention import use_decode_attention, use_prefill_attention
from ..optimize.cpu_matmul import use_cpu_matmul
from ..optimize.eager_fusions import fuse_eager_operators
from ..optimize.kv_cache_append import append_kv_cache_in_place
from ..optimize.moe_experts import run_experts_in_sequence
from ..passes import AnalyzeBase, InitializeOrLoadWeightsPass, build_parallel_pass_pipeline
from ..passes.replace import finish_plan, place_unused
from ..passes.solve import RESULT, Solved
from ..plan import Plan
from ..solver import Value
from ..tensor.sharded_tensor import ShardedTensor, UnplacedError, shard_gradient
from ..tensor.unshard import reshard_after_forward
from ..utils.memory import malloc_trim
from ..utils.progress import stage
from ..weights import materialize_parameters
from .dispatch_modes import with_dispatch_modes, without_dispatch_modes
from .gather_on_access import gather_on_access
from .guards import ParametersReplaced, Structure, needed_guards, other_than_parameters, with_same_parameters
from .inductor import compile_local, options_of, run_uncompiled
from .late_parameters import register_late_parameters

RECOMPILE_LIMIT = 64
"""Prefill, decode, training and their dynamic variants are all compilations of one function."""


def parallelize_backend(
    graph_module: GraphModule, example_inputs: list[Any], ctx: ParallelExecutionCtx, config: Config
) -> Callable[..., Any]:
    """A backend for ``torch.compile``: run the pass pipeline on a captured graph and return the local program.

    Use it as ``torch.compile(model, fullgraph=True, backend=partial(parallelize_backend, ctx=ctx, config=config))``
    on a model whose parameters carry :class:`~paraxis.core.ParameterMeta`; :func:`parallelize_model` does all that.
    """
    shown = config.show_progress and ctx.is_first
    with stage("Preparing the program for new inputs", shown and not ctx.planning):
        local = run_pipeline(graph_module, example_inputs, ctx, config)
    ctx.compile_times += 1
    include(example_inputs, ctx)
    if config.compile is None:
        fuse_eager_operators(local)
    if not torch.is_grad_enabled() and (config.compile is None or ctx.current_device.type == "cpu"):
        append_kv_cache_in_place(local, compiled=config.compile is not None)
    if not torch.is_grad_enabled() and ctx.current_device.type == "cpu":
        use_prefill_attention(local)
        use_decode_attention(local, compiled=config.compile is not None)
        if config.compile is None:
            run_experts_in_sequence(local)
        use_cpu_matmul(local, compiled=config.compile is not None)
    if splits(ctx, config):
        gather_when_used(local.graph)
        local.recompile()
    if torch.is_grad_enabled() and config.compile is None:
        recompute(local)
    if config.compile is None:
        return reshard_after_forward(local) if splits(ctx, config) else local
    meet(ctx.tp_group, ctx.current_device)
    options = options_of(config.mode, ctx.tp_group, ctx.current_device)
    if splits(ctx, config) and options.pop("triton.cudagraphs", False):
        logging.getLogger("paraxis").info("no CUDA graphs: weights that are gathered lie elsewhere in every call")
    with on_all_ranks(ctx.tp_group, "compiling the local program"), stage("Compiling with Inductor", shown):
        try:
            compiled = compile_local(local, graph_module, _sharded_parameters(graph_module, ctx), options, ctx)
            return reshard_after_forward(compiled) if splits(ctx, config) else compiled
        except GuardOnDataDependentSymNode as error:  # an operator of the model looks at its data in Python
            if ctx.rank == 0:
                reason = str(error).splitlines()
                why = next((line for line in reason if line.startswith("Caused by")), reason[0])
                logging.getLogger("paraxis").warning("Inductor cannot compile this graph, which runs as it is: %s", why)
            plain = run_uncompiled(local, graph_module, _sharded_parameters(graph_module, ctx))
            return reshard_after_forward(plain) if splits(ctx, config) else plain


def _sharded_parameters(captured: GraphModule, ctx: ParallelExecutionCtx) -> dict[Any, nn.Parameter]:
    """The sharded parameters of a solved graph, by the placeholder that brings them in."""
    solved: Solved = captured.meta[RESULT]
    known = [(node.meta["origin"].target, p) for node, p in solved.parameters.items() if p.meta is not None]
    return {target: ctx.param_cache[p.name] for target, p in known}


def _positions(captured: GraphModule, ctx: ParallelExecutionCtx) -> dict[int, nn.Parameter]:
    """The sharded parameters that a graph is called with, by their place among its arguments."""
    parameters = _sharded_parameters(captured, ctx)
    placeholders = captured.graph.find_nodes(op="placeholder")
    return {i: parameters[node.target] for i, node in enumerate(placeholders) if node.target in parameters}


def run_pipeline(
    graph_module: GraphModule, example_inputs: list[Any], ctx: ParallelExecutionCtx, config: Config
) -> GraphModule:
    """The passes, with all ranks agreeing on the graph before weights are read or collectives run."""
    ctx.example_inputs = example_inputs
    passes = list(config.pipeline or build_parallel_pass_pipeline())
    captured = graph_module
    loading = next((i for i, p in enumerate(passes) if isinstance(p, InitializeOrLoadWeightsPass)), len(passes))
    with on_all_ranks(ctx.world_group if ctx.planning else ctx.tp_group, "compiling the model", config.sync_timeout):
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
    ctx.example_inputs = [_without_data(x) for x in example_inputs]
    return graph_module


def _without_data(value: Any) -> Any:
    """An input as it looked: kept with its data, the cache of a first token would take its memory forever."""
    if not isinstance(value, torch.Tensor) or isinstance(value, (nn.Parameter, FakeTensor)):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


class CompiledCall:
    """What calling a module of a parallel model runs: its compiled graph or, if it is not one, those of its children.

    A module whose forward cannot be captured as one graph is *opened*: its own forward runs in Python, on whole
    tensors, and each of its children is compiled by itself, and opened in its turn if need be. That is said, with the
    line that stood in the way, in ``plan.breaks``.

    Of the whole model it is the forward that is replaced: it is also called directly, by wrappers of the model, and
    what wraps it (hooks, mixed precision) is left in Python. Then ``forward`` is the model's own.
    """

    def __init__(
        self,
        module: nn.Module,
        ctx: ParallelExecutionCtx,
        config: Config,
        name: str = "",
        forward: Callable[..., Any] | None = None,
    ) -> None:
        ignore_loggers()
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        self.module, self.ctx, self.config, self.name = module, ctx, config, name
        self.forward = forward
        self.opened = self.running = False
        self._seen = -1
        self._guarded = splits(ctx, config)
        self._structure = None if config.compile is None else Structure(module)
        self._compiled: Callable[..., Any] | None = None  # made by the first call: it imports much

    def _compile(self, options: dict[str, Any]) -> Callable[..., Any]:
        install_output_hooks(self.module)  # a model that runs by a plan that is given was not captured before
        unguarded = bool(options) and self.config.compile is None  # parameters are; torch.compile empties the options

        def backend(graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            register_late_parameters(self.module, self.name, self.ctx, self.config)
            program = parallelize_backend(graph_module, example_inputs, self.ctx, self.config)
            malloc_trim()
            if unguarded and not torch.is_grad_enabled():
                program = with_same_parameters(program, _positions(graph_module, self.ctx))
            return with_dispatch_modes(program)

        entry = fresh_entry(self.config.gather_outputs, forward=self.forward is not None)
        return torch.compile(entry, fullgraph=True, backend=backend, options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.opened:
            if self._seen != self.ctx.compile_times:  # the call before compiled: this one may have to as well
                self._seen = self.ctx.compile_times
                malloc_trim()
                mark_dynamic(args, kwargs)
            if self.config.enable_sequence_parallel:
                mark_static(args, kwargs)
            changed = self._structure is not None and self._structure.changed()
            if self._compiled is None or changed:
                wanted = other_than_parameters if self.config.compile is None else needed_guards
                self._compiled = self._compile({} if self._guarded else {"guard_filter_fn": wanted})
            self.running = True
            try:
                with no_mha_fastpath(), gc_paused(), without_dispatch_modes():
                    result = self._compiled(self.module, *args, **kwargs)
                return gather_on_access(result) if self.config.gather_outputs else result
            except ParametersReplaced:  # compile again, with all guards
                if self._guarded:
                    raise
                self._guarded, self._compiled = True, self._compile({})
                return self(*args, **kwargs)
            except dynamo.exc.TorchDynamoException as error:
                problem = translated(error, self.module)
                if not isinstance(problem, GraphBreak):
                    raise problem from error
            finally:
                self.running = False
            self.open(str(problem))
        if self.forward is not None:
            return self.forward(*args, **kwargs)
        return self.module._call_impl(*args, **kwargs)

    def open(self, problem: str) -> None:
        """Run the module's own forward in Python from now on, and compile its children instead."""
        if splits(self.ctx, self.config):
            raise CaptureError(
                f"{self.name or 'the model'} is not one graph, and data-parallel ranks that split parameters must "
                f"gather them in one order, whatever their data: {problem}. Use data_parallel='replicate'."
            )
        self.opened = True
        if self.ctx.plan is None:
            self.ctx.plan = Plan(self.ctx.world_size)
        self.ctx.plan.breaks.append(f"{self.name or 'the model'}: {problem}")
        if self.ctx.rank == 0:
            logging.getLogger("paraxis").warning("%s. Its parts run as graphs of their own.", problem)
        if self.ctx.planning:  # its own parameters are read by Python code, which no plan knows
            place_unused(self.ctx, set(map(id, self.module.parameters(recurse=False))))
            materialize_parameters(self.ctx, self.config)
        for parameter in self.module.parameters():
            if isinstance(parameter, ShardedTensor) and parameter.requires_grad and not parameter._backward_hooks:
                parameter.register_hook(partial(shard_gradient, parameter))
        for name, child in _callable_children(self.module, self.name):
            child._compiled_call_impl = CompiledCall(child, self.ctx, self.config, name)  # type: ignore[assignment]


def _callable_children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The children with a forward of their own; those of a list or dictionary of modules in its place."""
    found = []
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if type(child).forward is nn.Module.forward or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _callable_children(child, path)
        elif any(True for _ in child.parameters()):
            found.append((path, child))
    return found


def plan_in_pieces(
    call: CompiledCall, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: ParallelExecutionCtx, obstacle: str
) -> None:
    """Plan a model that is not one graph by running it: every graph is solved and loaded when it is met."""
    call.open(obstacle)
    try:
        call(*args, **kwargs)
    except UnplacedError:  # read by Python code before any graph: place all the rest, and go through it again
        finish_plan(ctx)
        materialize_parameters(ctx, call.config)
        call(*args, **kwargs)


# -- agreement of the ranks ----------------------------------------------------------------------------------------


def _digest(graph_module: GraphModule) -> str:
    """A fingerprint of what the ranks must do alike and in the same order, or must not run at all.

    Operators in between may come in another order: a model that goes through a set of strings does so differently in
    every process.
    """
    solved: Solved = graph_module.meta[RESULT]
    placements = {p.name: str(solved.solution.parameters.get(Value(n))) for n, p in solved.parameters.items()}
    shapes = sorted(
        f"{_target(step.call.target)} {[tuple(map(str, t.shape)) for t in (*step.call.inputs, *step.call.outputs)]}"
        for step in solved.program.steps
        if step.call is not None
    )
    results = [str(p) for p in solved.solution.results]
    text = "\n".join([*solved.order, *(f"{n} {p}" for n, p in sorted(placements.items())), *shapes, *results])
    return hashlib.sha256(text.encode()).hexdigest()


def _target(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "")


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
    group = ctx.world_group if ctx.planning else ctx.tp_group
    answers = all_gather_object(group, [digest, summary], "comparing the compiled graphs", config.sync_timeout)
    if len({digest for digest, _ in answers}) > 1:
        described = "; ".join(f"rank {rank}: {inputs}" for rank, (_, inputs) in enumerate(answers))
        raise RuntimeError(
            f"rank {ctx.rank} of {ctx.world_size}: the ranks compiled different graphs, whose collectives would wait "
            f"for one another forever. Inputs on {described}. Every rank must call the model with inputs of the same "
            "shapes and in the same mode."
        )
