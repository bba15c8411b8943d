"""A rank's lifted program, compiled by Inductor, and what is called with the arguments of the captured graph.

The pass ``lift`` has taken the local program apart: shards in, a program on plain tensors, shards out. Here the program
in the middle is compiled, and the two ends are put around it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ..compat.dynamo import TracingContext, name_inputs, tracing
from ..compat.inductor import aliases_allowed, compile_graph, cpp_compile_failed
from ..compat.paged_attention import PAGED_ATTENTION
from ..config import Config
from ..context import ParallelExecutionCtx
from ..graph.local_program import info_of
from ..graph.python_calls import with_python_calls
from ..passes.lift import Lifted, ResultAt, lifted_of, like_shard
from ..passes.setting import inductor_options
from ..tensor.graph_io import wrap_shards
from ..tensor.sharded_tensor import ShardedTensor, unwrap
from .block_programs import OutlineOfCall
from .cuda_graphs import CUDAGraphRunner, on_device, pool_of
from .eager_start import StartsEagerly, has_fixed_sizes
from .early_launch import EarlyLaunches
from .guards import HeldShards, ParametersReplaced, form_of, picker, with_same_parameters
from .outlined_program import OutlinedProgram
from .program_runs import observer
from .stride_guard import ShardGuard

UNCHECKED = {"assert_indirect_indexing": False}
"""Without checks that indices are within bounds, in code for CPUs."""


def compile_program(
    program: GraphModule,
    ctx: ParallelExecutionCtx,
    config: Config,
    blocks: OutlineOfCall | None = None,
    together: Callable[[Callable[[], Any]], Any] | None = None,
) -> Callable[..., Any]:
    """Compile a lifted program; the result is called with the arguments of the captured graph.

    With ``blocks``, the outline of a program of the first blocks, it runs all of them. With ``together``, which calls a
    function on all ranks, its first run is by Python, if its sizes are fixed.
    """
    lifted, grad = lifted_of(program), torch.is_grad_enabled()
    options = inductor_options(ctx, config)
    paged = bool(
        program.graph.find_nodes(op="call_function", target=PAGED_ATTENTION)
    )  # its KV cache is found by Python
    cuda_graphs = bool(options.get("triton.cudagraphs")) and not lifted.dynamic and not paged
    # Without gradients the CUDA graphs are our own: Inductor's copy what they are called with.
    options = {**options, "triton.cudagraphs": cuda_graphs and grad, **lifted.inductor}

    def compile_piece(piece: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        name_inputs(piece, _static_inputs(lifted) if piece is program else set())
        with tracing(TracingContext(lifted.fake_mode)):
            try:
                return compile_graph(piece, examples, options)
            except Exception as error:
                if not cpp_compile_failed(error):
                    raise
                # torch 2.11 writes checks of indices that name a variable it does not declare
                return compile_graph(piece, examples, {**options, **UNCHECKED})

    def compile_all() -> Callable[..., Any]:
        return compile_piece(program, lifted.examples) if blocks is None else blocks.compiled(compile_piece)

    compiled: Callable[..., Any]
    if together is not None and not grad and has_fixed_sizes(lifted.examples):
        by_python = with_python_calls(program).forward if blocks is None else blocks.compiled(None)
        compiled = StartsEagerly(by_python, lambda: together(compile_all))
    else:
        compiled = compile_all()
    if grad:
        return _caller(lifted, _copy_results(compiled) if cuda_graphs else compiled)
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in lifted.examples)
    return _caller(lifted, compiled, pool_of(ctx) if cuda_graphs and on_gpu else None, blocks, ctx.state.early_launches)


def run_outlined(program: GraphModule, blocks: OutlineOfCall) -> Callable[..., Any]:
    """A lifted program of the first blocks, run by Python for all of them."""
    return _caller(lifted_of(program), blocks.compiled(None), blocks=blocks)


def run_uncompiled(program: GraphModule) -> Callable[..., Any]:
    """A local program that Inductor cannot compile. It checks its arguments as compiled programs do, since guards on
    them were left out, unless there are gradients to compute."""
    if torch.is_grad_enabled():
        return program
    info = info_of(program)
    targets = [node.target for node in program.graph.find_nodes(op="placeholder")]
    known = ShardGuard(
        {i: x for i, x in enumerate(info.inputs) if isinstance(x, ShardedTensor) and targets[i] not in info.parameters}
    )
    checked = with_same_parameters(program, parameters_by_position(program))

    def run(*args: Any) -> Any:
        if not known.matches(args):
            raise ParametersReplaced("a program was called with other tensors than it was made for")
        return checked(*args)

    return run


def parameters_by_position(program: GraphModule) -> dict[int, nn.Parameter]:
    """The sharded parameters that a local program is called with, by their position among its arguments."""
    parameters = info_of(program).parameters
    placeholders = program.graph.find_nodes(op="placeholder")
    return {i: parameters[node.target] for i, node in enumerate(placeholders) if node.target in parameters}


def _copy_results(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Results in memory of their own: that of a CUDA graph is used again by the next call, and a cache must live on."""

    def run(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return [x.clone() if isinstance(x, torch.Tensor) else x for x in compiled(*args)]

    return run


def _caller(
    lifted: Lifted,
    compiled: Callable[..., Any],
    pool: Any = None,
    blocks: OutlineOfCall | None = None,
    early: EarlyLaunches | None = None,
) -> Callable[..., Any]:
    """What is called with the arguments of the captured graph; with ``pool``, captured as a CUDA graph if possible."""
    inputs_of_graph = info_of(lifted.source).inputs
    known = ShardGuard({i: x for i in lifted.inputs if isinstance(x := inputs_of_graph[i], ShardedTensor)})
    like = blocks.like if blocks is not None else []  # inputs of further blocks are like these
    parameters = [*lifted.parameters, *(blocks.parameters if blocks is not None else ())]
    wrappers: dict[Any, list[int]] = {}
    for i, arguments in lifted.wrappers.items():
        wrappers.setdefault(arguments, []).append(i)
    outlined = compiled.program if isinstance(compiled, StartsEagerly) else compiled
    if isinstance(outlined, OutlinedProgram):
        for i, j in enumerate(outlined.extra):
            if j in lifted.wrappers:
                wrappers[lifted.wrappers[j]].append(outlined.own + i)
    brought, expected, inputs = picker(lifted.arguments), tuple(lifted.arguments.values()), picker(lifted.inputs)
    own, device = len(lifted.inputs), lifted.device
    scalars = [*lifted.scalars, *(own + i for i, other in enumerate(like) if other in lifted.scalars)]
    sharded_over_dp = any(p.dp_shard is not None for p in parameters)  # type: ignore[attr-defined]
    forms = [form_of(like_shard(p)) for p in parameters]
    held = None if sharded_over_dp else HeldShards(parameters, forms)
    written = [i for i, position in enumerate(lifted.inputs) if position in lifted.written]
    written += [own + i for i, other in enumerate(like) if other in written]
    runner = CUDAGraphRunner(compiled, written, scalars, pool, early) if pool is not None else None

    def unsharded() -> list[torch.Tensor]:
        shards = [unwrap(p) for p in parameters]
        if [form_of(x) for x in shards] != forms:
            raise ParametersReplaced("a parameter has a shard of another form than it was compiled for")
        return shards

    ran = False

    def run(*args: Any) -> Any:
        nonlocal ran
        if not all(map(is_, brought(args), expected)) or not known.matches(args):
            raise ParametersReplaced("a compiled program was called with other tensors than it was compiled for")
        if torch.is_grad_enabled():
            results = compiled(*(unwrap(p) for p in parameters), *(unwrap(x) for x in inputs(args)))
        else:
            passed = inputs(args)
            if blocks is not None:
                passed = (*passed, *blocks.inputs(passed))
            local = [x._local if isinstance(x, ShardedTensor) else x for x in passed]
            shards = unsharded() if held is None else held.shards()
            observe = observer()
            # KV caches append in place where they can (optimize/kv_cache_append.py).
            with nullcontext() if ran or runner is not None else aliases_allowed():
                if observe is not None and held is not None and not scalars:
                    results = observe(compiled, shards, local)
                elif runner is not None:
                    results = runner(shards, local)
                else:
                    results = compiled(*shards, *on_device(local, scalars, device))
            ran = True
        if wrappers:
            wrap_shards(results := list(results), wrappers)
        if blocks is not None and isinstance(outlined, OutlinedProgram):
            blocks.note(outlined, results)
        return torch.fx.node.map_aggregate(lifted.results, lambda x: results[x.position] if type(x) is ResultAt else x)

    return run


def _static_inputs(lifted: Lifted) -> set[int]:
    """The arguments of a lifted program that have a fixed address, so that CUDA graphs need not copy them."""
    count = len(lifted.parameters)
    return {*range(count), *(count + i for i, position in enumerate(lifted.inputs) if position in lifted.written)}
