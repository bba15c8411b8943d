"""Calling a module of a parallel model: its compiled graph or, after a graph break, those of its children."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ..capture.dynamic_shapes import mark_dynamic, mark_static
from ..capture.required_gradients import check_required_gradients
from ..capture.trace import adapt_libraries, end_tracing, fresh_entry, ignore_loggers, translated
from ..compat.dynamo import CAPTURE_ERRORS, raise_recompile_limit, traced_methods
from ..compat.torch import has_backward_hooks, is_transformed
from ..compat.transformers import collector_as_global
from ..config import Config
from ..context import ParallelExecutionCtx
from ..data_parallel.shard import shards_parameters
from ..errors import CaptureError, GraphBreak
from ..passes.setting import compiles
from ..plan import Plan
from ..plan.apply import apply_plan, parameter_metas
from ..plan.build import PlanBuilder
from ..tensor.sharded_tensor import ShardedTensor, UnplacedError, shard_gradient
from ..utils.memory import gc_paused, malloc_trim
from ..weights.materialize import materialize_parameters
from .backend import parallelize_backend
from .block_programs import BlockPrograms, NotRepeated, find_block_programs
from .conversion import Dtypes
from .dispatch_modes import with_dispatch_modes, without_dispatch_modes
from .gather_on_access import gather_on_access
from .guards import (
    ParametersReplaced,
    all_guards,
    attributes_read,
    needed_guards,
    other_than_parameters,
    with_same_parameters,
)
from .inductor import parameters_by_position
from .late_parameters import register_late_parameters
from .model_watch import ModelWatch
from .submodule_call import callable_children, install_submodule_call

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and those by name."""

CallKind = tuple[int, frozenset[str]]
"""How many real-valued tensors a call has by position, and which by name."""

RECOMPILE_LIMIT = 64
"""Prefill, decode, training and their dynamic variants are all compilations of one function."""


class CompiledCall:
    """What calling a module of a parallel model runs.

    A module whose forward cannot be captured as one graph *falls back*: its own forward runs in Python, on replicated
    tensors, and each of its children is compiled by itself, and falls back in its turn if need be. ``plan.breaks`` says
    so, with the line that breaks the graph. Only calls with the same data do: a prefill with images may break the
    graph of a model whose decode steps are one graph. It does the same where submodules have hooks that must run in
    Python (:mod:`.hooks`), for as long as they have.

    Hooks of the module itself run around this call. Of the model itself the forward is replaced: it is also called
    directly, by wrappers of the model. Then ``forward`` is the model's own.
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
        adapt_libraries()
        raise_recompile_limit(RECOMPILE_LIMIT)
        self.module, self.ctx, self.config, self.name = module, ctx, config, name
        self.forward = forward
        self.fell_back = self.running = self.hooked = False
        self.broken: dict[CallKind, str] = {}
        """The kinds of calls that fall back, and why; ``fell_back`` is for all."""
        self._compile_times = -1
        self._guarded = shards_parameters(ctx, config)
        self._watch: ModelWatch | None = None
        self._dtypes = Dtypes(module)
        self._blocks: BlockPrograms | None = None
        self._programs: dict[Any, Callable[..., Any]] = {}
        """Programs by the hooks that are part of them (one is used again when a hook is removed) and their blocks."""
        self._blocks_of: ModelWatch | None = None

    def _compile(self, blocks: BlockPrograms | None = None) -> Callable[..., Any]:
        unguarded = not self._guarded  # parameters are
        watch = self._watch
        assert watch is not None

        def needed(entries: Sequence[Any]) -> list[bool]:
            watch.read_attributes(attributes_read(entries))
            return needed_guards(entries, watch.watches)

        checks_itself = False

        def reduced(entries: Sequence[Any]) -> list[bool]:
            """The guards of the program that was made last: a compiled or lifted one checks the shards itself."""
            fewer = self.config.compile is not None and checks_itself
            return needed(entries) if fewer else other_than_parameters(entries)

        def backend(graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            nonlocal checks_itself
            methods = traced_methods()
            check_required_gradients(graph_module, self.forward is not None, self.name)
            register_late_parameters(self.module, self.name, self.ctx, self.config)
            program = parallelize_backend(graph_module, example_inputs, self.ctx, self.config, blocks, self.name)
            malloc_trim()
            watch.read_methods(methods)
            checks_itself = blocks is not None or compiles(self.ctx, self.config)
            if unguarded and not torch.is_grad_enabled() and not checks_itself:
                assert self.ctx.last_optimized_graph_module is not None
                program = with_same_parameters(program, parameters_by_position(self.ctx.last_optimized_graph_module))
            return with_dispatch_modes(program)

        entry = fresh_entry(self.config.gather_outputs, forward=self.forward is not None)
        guards: dict[str, Any] = {"guard_filter_fn": all_guards if self._guarded else reduced}
        program = torch.compile(entry, fullgraph=True, backend=backend, options=guards)
        self._programs[watch.graph_hooks, blocks] = program
        return program

    def _first_blocks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockPrograms | None:
        """The programs of the first blocks, if this call may run them for all blocks."""
        if self.forward is None or torch.is_grad_enabled() or shards_parameters(self.ctx, self.config):
            return None
        watch, generating = self._watch, self.ctx.state.generating
        if self._blocks_of is not watch or (self._blocks is not None and self._blocks.changed(generating)):
            self._blocks_of, self._blocks = watch, find_block_programs(self.module)
        return self._blocks if self._blocks is not None and self._blocks.takes(args, kwargs) else None

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a compiled program: that of the first blocks if possible."""
        watch = self._watch
        assert watch is not None
        blocks = self._first_blocks(args, kwargs)
        if blocks is not None:
            program = self._programs.get((watch.graph_hooks, blocks)) or self._compile(blocks)
            try:
                return blocks.run(program, args, kwargs)
            except (NotRepeated, *CAPTURE_ERRORS) as error:
                problem = error if isinstance(error, NotRepeated) else translated(error, self.module)
                if not isinstance(problem, (NotRepeated, GraphBreak)):
                    raise
                logging.getLogger("paraxis").info("captured with all blocks: %s", problem)
                blocks.refuse(args, kwargs)
        program = self._programs.get((watch.graph_hooks, None)) or self._compile()
        return program(self.module, *args, **kwargs)

    def _take_up_changes(self) -> None:
        """After a first look at the module, or at what somebody has changed since: choose what a call runs."""
        watch = self._watch
        stale = watch is None or watch.look()
        if watch is None:
            watch = ModelWatch(self.module, torch_modules=self.config.compile is not None)
        if stale:
            self._programs.clear()
            self._blocks_of = None  # another list of blocks, maybe
        self._watch = None  # look again in the next call, if what was found is refused
        hooks = watch.python_hooks
        if hooks and not self.hooked:
            named = [f"{self.name}.{name}" if self.name else name for name in hooks[:3]]
            shown = ", ".join(named) + (f" and {len(hooks) - 3} more" if len(hooks) > 3 else "")
            self._run_in_python(f"the hooks of {shown} run in Python, at every call")
        self._watch, self.hooked = watch, bool(hooks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled graph, compiling it first if this is a new kind of call."""
        check = self.ctx.state.input_check
        if check is not None and not check.active:  # the outermost call: compare its inputs between ranks
            return check.run(self, args, kwargs)
        if is_transformed():
            return self._run_transformed(args, kwargs)
        falls_back = self.fell_back or (bool(self.broken) and kind_of(args, kwargs) in self.broken)
        if not falls_back and (self._watch is None or self._watch.changed()):
            self._take_up_changes()
        if not falls_back and not self.hooked:
            if self._compile_times != self.ctx.compile_times:  # the call before compiled: this one may have to as well
                self._compile_times = self.ctx.compile_times
                malloc_trim()
                mark_dynamic(args, kwargs)
            if self.config.enable_sequence_parallel:
                mark_static(args, kwargs)
            if self._dtypes.changed():
                self._programs.clear()
            self.running = True
            try:
                with without_dispatch_modes(), nullcontext() if self.forward else collector_as_global():
                    result = self._run(args, kwargs)
                return gather_on_access(result) if self.config.gather_outputs else result
            except ParametersReplaced:  # compile again, with all guards
                if self._guarded:
                    raise
                self._guarded = True
                self._programs.clear()
                return self(*args, **kwargs)
            except CAPTURE_ERRORS as error:
                problem = translated(error, self.module)
                if not isinstance(problem, GraphBreak):
                    raise problem from error
            finally:
                self.running = False
                end_tracing()
            if self._watch is not None and self._watch.leave_graph():  # it may be a hook that breaks the graph
                self._take_up_changes()
                return self(*args, **kwargs)
            self.fall_back(str(problem), kind_of(args, kwargs))
        return self._own_forward(args, kwargs)

    def _own_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.forward is None:
            return self.module.forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _run_transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own forward for a caller that transforms it (``torch.func``): operator by operator, on
        parameters that are gathered when they are used. Dynamo captures no program there. Says nothing about calls
        without a transform, which stay graphs."""
        if shards_parameters(self.ctx, self.config):
            raise CaptureError(
                f"{self.name or 'the model'} is called inside of a transform of torch.func or forward differentiation, "
                "which cannot be captured as one graph; data-parallel ranks that shard parameters need one. Use "
                "data_parallel='replicate'."
            )
        if not self.ctx.state.transformed:
            self.ctx.state.transformed = True
            if self.ctx.rank == 0:
                logging.getLogger("paraxis").warning(
                    "%s is called inside of a transform of torch.func or forward differentiation: such calls gather "
                    "the parameters they use, and every rank computes all of it.",
                    self.name or "the model",
                )
        self._shard_gradients()
        return self._own_forward(args, kwargs)

    def _shard_gradients(self) -> None:
        """Let parameters that are used outside of a graph shard the full gradients that they get there."""
        for parameter in self.module.parameters():
            if isinstance(parameter, ShardedTensor) and parameter.requires_grad and not has_backward_hooks(parameter):
                parameter.register_hook(partial(shard_gradient, parameter))

    def fall_back(self, problem: str, kind: CallKind | None = None) -> None:
        """For calls of this kind, or all: run the module's own forward in Python from now on, and compile its children
        instead."""
        self._run_in_python(problem)
        if kind is None:
            self.fell_back = True
        else:
            self.broken[kind] = problem
        plan = self.ctx.plan or Plan(self.ctx.world_size)
        breaks = dict.fromkeys((*plan.breaks, f"{self.name or 'the model'}: {problem}"))
        self.ctx.plan = replace(plan, breaks=tuple(breaks))

    def _run_in_python(self, problem: str) -> None:
        """Prepare for running the module's own forward in Python, and the children as graphs of their own."""
        if shards_parameters(self.ctx, self.config):
            raise CaptureError(
                f"{self.name or 'the model'} is not one graph, and data-parallel ranks that shard parameters must "
                f"gather them in one order, whatever their data: {problem}. Use data_parallel='replicate'."
            )
        if self.ctx.rank == 0:
            logging.getLogger("paraxis").warning("%s. Its parts run as graphs of their own.", problem)
        if self.ctx.state.planning:  # its own parameters are read by Python code, which no plan knows
            own = set(map(id, self.module.parameters(recurse=False)))
            place_unused(self.ctx, self.config, own)
        self._shard_gradients()
        for name, child in callable_children(self.module, self.name):
            install_submodule_call(child, partial(CompiledCall, child, self.ctx, self.config, name))


def place_unused(ctx: ParallelExecutionCtx, config: Config, which: set[int] | None = None) -> None:
    """Place and load those of these parameters (by id; all of them, by default) that no graph has placed."""
    builder = PlanBuilder.of(ctx.plan, ctx.world_size)
    shapes = {
        name: tuple(ctx.param_cache[name].shape)
        for name in parameter_metas(ctx)
        if which is None or id(ctx.param_cache[name]) in which
    }
    builder.add_unused(shapes)
    apply_plan(builder.build(), ctx)
    materialize_parameters(ctx, config)


def plan_by_running(call: CompiledCall, calls: Iterable[Call], reason: str) -> None:
    """Plan a model with graph breaks by running it: every graph is solved, applied and loaded when it is met.

    ``calls`` are (args, kwargs) of the calls to plan it with; later ones are for parameters that no earlier one uses.
    """
    with _planning(call):
        call.fall_back(reason)
        for args, kwargs in calls:
            if _all_placed(call):
                break
            _plan_call(call, args, kwargs)
    place_unused(call.ctx, call.config)


def plan_rest_by_running(call: CompiledCall, calls: Iterable[Call], plan: Plan, derived: bool) -> None:
    """Apply a plan that was made without the calls that break the graph, and plan the parameters that only they use by
    running them. The parts between the breaks, such as a vision tower, are then planned for what they compute.

    Args:
        call: The program of the model.
        calls: Of all kinds.
        plan: The plan, in which these parameters are ``unplanned``.
        derived: Whether the inputs are dummy inputs, of which some may not do.
    """
    ctx, left = call.ctx, set(plan.unplanned)
    parameters = {name: p for name, p in plan.parameters.items() if name not in left}
    replicated = [each for each in plan.replicated if each[0] not in left]
    apply_plan(replace(plan, parameters=parameters, replicated=replicated, unplanned=()), ctx)
    materialize_parameters(ctx, call.config)
    with _planning(call):
        for args, kwargs in calls:
            if _all_placed(call):
                break
            try:
                _plan_call(call, args, kwargs)
            except Exception as error:  # on all ranks, as when the plan was searched, which has said so
                if not derived:
                    raise
                logging.getLogger("paraxis").info("not planned: %s", error)
    place_unused(ctx, call.config)


@contextmanager
def _planning(call: CompiledCall) -> Iterator[None]:
    """Inside, graphs that are compiled add to the plan."""
    call.ctx.state.planning = True
    try:
        with torch.no_grad(), gc_paused():
            yield
    finally:
        call.ctx.state.planning = False


def _all_placed(call: CompiledCall) -> bool:
    return all(meta.placement is not None for meta in parameter_metas(call.ctx).values())


def _plan_call(call: CompiledCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a call, whose graphs are planned. A parameter that Python code reads before any graph does is placed then."""
    ctx, seen = call.ctx, set[str]()
    while True:
        try:
            call(*args, **kwargs)
            return
        except UnplacedError as error:
            known = ctx.param_cache.get(error.name)
            place_unused(ctx, call.config, None if known is None or error.name in seen else {id(known)})
            if known is None and error.name in seen:
                raise
            seen.add(error.name)


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKind:
    """What calls of one kind have in common: the real-valued tensors that they bring, such as images and sounds.

    Token ids, masks, caches and options differ between prefill, decode and training steps, of which each would try to
    be captured again.
    """
    return sum(map(_is_data, args)), frozenset(name for name, value in kwargs.items() if _is_data(value))


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
