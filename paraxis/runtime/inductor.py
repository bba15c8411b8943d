"""Running the local program of a rank through Inductor, with CUDA graphs where asked for.

The local program takes what the captured graph took: sharded parameters and caches, plain tensors, numbers. Inductor
must see local tensors only. So the program is taken in three: the shards of the inputs and of the parameters are taken
out (:func:`lift`), the plain program in the middle is compiled, and results that stay sharded are wrapped again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import Graph, GraphModule, Node

from ..context import ParallelExecutionCtx
from ..distributed.collectives import backend_of
from ..graph.mutation import mutated
from ..layers import ColumnParallelLinear, RowParallelLinear
from ..optimize.cpu_matmul import Rows
from ..optimize.decode_kernels import use_decode_kernels
from ..optimize.fuse_rope_kv_write import fuse_rope_kv_write, merge_cache_counters
from ..optimize.prefill import drop_causal_masks, is_prefill, merge_narrow_linears, move_scalars_to_device
from ..optimize.single_query_attention import decompose_single_query_attention
from ..tensor.sharded_tensor import ShardedTensor, override_shards, unwrap
from .cuda_graphs import CUDAGraphRunner, on_device, pool_of
from .guards import HeldShards, ParametersReplaced, form_of, picker, with_same_parameters
from .stride_guard import KnownShards

aten = torch.ops.aten
LONG = {"realize_reads_threshold": 1}
"""For prompts: a sum that is used again is stored. Computing it anew reads all its terms: of the sums around a
residual connection as many as there were since the last one stored."""

UNCHECKED = {"assert_indirect_indexing": False}
"""Without checks that indices are within bounds, in code for CPUs."""


def options_of(mode: str | None, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Inductor's options for a mode, without CUDA graphs where the ranks talk through the host's memory."""
    from torch._inductor import list_mode_options

    options: dict[str, Any] = dict(list_mode_options(mode or "default"))
    through_host = group.size() > 1 and device.type == "cuda" and backend_of(group, device) == "gloo"
    if through_host and options.pop("triton.cudagraphs", False):
        logging.getLogger("paraxis").info("no CUDA graphs: gloo's collectives cannot be recorded in them")
    return options


@dataclass
class Lifted:
    """A local program on plain tensors, and where its arguments come from and its results go."""

    program: GraphModule
    parameters: list[nn.Parameter] = field(default_factory=list)
    """The first arguments are the shards of these."""
    arguments: dict[int, nn.Parameter] = field(default_factory=dict)
    """The parameters that the caller must bring, by their place among its arguments."""
    inputs: list[int] = field(default_factory=list)
    """Then these of the caller's arguments, or their shards."""
    written: set[int] = field(default_factory=set)
    """Those of the caller's arguments that the program writes to: caches of a fixed size."""
    moved: list[int] = field(default_factory=list)
    """Places, among the inputs, of numbers that come on the host and are taken on the device."""
    wrappers: dict[int, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """By position among the results: what makes a sharded tensor of it again."""
    device: torch.device | None = None
    results: Any = None
    """The structure of the results, with positions for tensors."""


def compile_local(
    program: GraphModule,
    captured: GraphModule,
    parameters: dict[Any, nn.Parameter],
    options: dict[str, Any],
    owner: ParallelExecutionCtx,
) -> Callable[..., Any]:
    """The local program of a captured graph, compiled with Inductor's ``options``.

    ``parameters`` are the sharded ones by the placeholder that brings them in.

    A program that draws random numbers is returned as it is, with a word in the log: every rank draws from a state of
    its own for what is split and from a common one for what is not, which Inductor's generator cannot express.
    """
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.exc import CppCompileError, InductorError

    if any(node.meta.get("random") for node in program.graph.nodes):
        logging.getLogger("paraxis").info("a graph with random draws (dropout) is not compiled by Inductor")
        return run_uncompiled(program, captured, parameters)
    grad = torch.is_grad_enabled()
    lifted = lift(program, parameters, alone=owner.world_size == 1 and not grad)
    lifted.device = owner.current_device
    given = [node.meta["example_value"] for node in captured.graph.find_nodes(op="placeholder")]
    fake_mode = detect_fake_mode([x for x in given if isinstance(x, torch.Tensor)])
    assert fake_mode is not None, "a graph is compiled for fake inputs"
    shards = [fake_mode.from_tensor(_like_shard(p), static_shapes=True) for p in lifted.parameters]
    for shard, parameter in zip(shards, lifted.parameters, strict=True):
        shard.requires_grad_(grad and parameter.requires_grad)
    examples = [*shards, *(_plain(given[i]) for i in lifted.inputs)]
    dynamic = any(isinstance(x, torch.SymInt) for x in examples)
    graphs = bool(options.get("triton.cudagraphs")) and not dynamic
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in examples)
    if on_gpu and not grad:
        moved = move_scalars_to_device(lifted.program.graph, examples, owner.current_device)
        lifted.moved = [i - len(shards) for i in moved]
        lifted.written -= {lifted.inputs[i] for i in lifted.moved}
        lifted.program.recompile()
        if graphs:  # kernels that are launched from Python are worth it only where that happens once
            use_decode_kernels(lifted.program, examples)
        decompose_single_query_attention(lifted.program)
        drop_causal_masks(lifted.program)
        merge_narrow_linears(lifted.program, examples)
        if graphs:
            fuse_rope_kv_write(lifted.program)
            merge_cache_counters(lifted.program)
    _describe(lifted)
    patches = {**options, "triton.cudagraphs": graphs and grad}
    if on_gpu and is_prefill(lifted.program.graph):
        patches |= LONG
    if not on_gpu and not grad and inductor_config.post_grad_custom_pre_pass is None:  # or the user has another one
        patches["post_grad_custom_pre_pass"] = Rows()
    with tracing(TracingContext(fake_mode)):
        try:
            compiled = compile_fx(lifted.program, examples, config_patches=patches)
        except InductorError as error:
            if not isinstance(error.inner_exception, CppCompileError):
                raise
            # torch 2.11 writes checks of indices that name a variable it does not declare
            compiled = compile_fx(lifted.program, examples, config_patches={**patches, **UNCHECKED})
    known = KnownShards({i: x for i in lifted.inputs if isinstance(x := given[i], ShardedTensor)})
    if grad:
        return _caller(lifted, _kept(compiled) if graphs else compiled, known)
    return _caller(lifted, compiled, known, pool_of(owner) if graphs and on_gpu else None)


def run_uncompiled(
    program: GraphModule, captured: GraphModule, parameters: dict[Any, nn.Parameter]
) -> Callable[..., Any]:
    """A program that is not compiled where others are. It looks at its arguments as they do: guards on them were left
    out, unless there are gradients to compute."""
    if torch.is_grad_enabled():
        return program
    placeholders = list(enumerate(captured.graph.find_nodes(op="placeholder")))
    shown = {i: node.meta["example_value"] for i, node in placeholders if node.target not in parameters}
    known = KnownShards({i: x for i, x in shown.items() if isinstance(x, ShardedTensor)})
    checked = with_same_parameters(
        program, {i: parameters[node.target] for i, node in placeholders if node.target in parameters}
    )

    def run(*args: Any) -> Any:
        if not known.fits(args):
            raise ParametersReplaced("a program was called with other tensors than it was made for")
        return checked(*args)

    return run


def _kept(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Results in memory of their own: that of a CUDA graph is used again by the next call, and a cache must live on."""

    def run(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return [x.clone() if isinstance(x, torch.Tensor) else x for x in compiled(*args)]

    return run


def _caller(lifted: Lifted, compiled: Callable[..., Any], known: KnownShards, pool: Any = None) -> Callable[..., Any]:
    """What is called with the arguments of the captured graph; with ``pool``, recorded where it can be."""
    sharded, wrappers = lifted.parameters, lifted.wrappers
    brought, expected, inputs = picker(lifted.arguments), tuple(lifted.arguments.values()), picker(lifted.inputs)
    moved, device = lifted.moved, lifted.device
    split = any(p.dp_shard is not None for p in sharded)  # type: ignore[attr-defined]
    forms = [form_of(_like_shard(p)) for p in sharded]
    held = None if split else HeldShards(sharded, forms)
    written = [i for i, position in enumerate(lifted.inputs) if position in lifted.written]
    recorded = CUDAGraphRunner(compiled, written, moved, pool) if pool is not None else None

    def gathered() -> list[torch.Tensor]:
        shards = [unwrap(p) for p in sharded]
        if [form_of(x) for x in shards] != forms:
            raise ParametersReplaced("a parameter has a shard of another form than it was compiled for")
        return shards

    def run(*args: Any) -> Any:
        if not all(map(is_, brought(args), expected)) or not known.fits(args):
            raise ParametersReplaced("a compiled program was called with other tensors than it was compiled for")
        if torch.is_grad_enabled():
            results = compiled(*(unwrap(p) for p in sharded), *(unwrap(x) for x in inputs(args)))
        else:
            given = [x._local if isinstance(x, ShardedTensor) else x for x in inputs(args)]
            shards = gathered() if held is None else held.shards()
            if recorded is not None:
                results = recorded(shards, given)
            else:
                results = compiled(*shards, *on_device(given, moved, device))
        if wrappers:
            results = [wrappers[i](x) if i in wrappers else x for i, x in enumerate(results)]
        return torch.fx.node.map_aggregate(lifted.results, lambda x: results[x.position] if type(x) is _At else x)

    return run


def _like_shard(parameter: Any) -> torch.Tensor:
    """The shard that a program takes, or one that is like it where data-parallel ranks split it."""
    local: torch.Tensor = parameter._local
    return local if parameter.dp_shard is None else local.new_empty(parameter.dp_shard.shape)


@dataclass(frozen=True)
class _At:
    """A place among the results."""

    position: int


def _plain(value: Any) -> Any:
    return value._local if isinstance(value, ShardedTensor) else value


# -- taking the shards out -----------------------------------------------------------------------------------------


REDISTRIBUTIONS = ("all_reduce", "all_gather", "reduce_scatter", "take_shard", "share", "unshare", "first_rank_only")


def lift(program: GraphModule, parameters: dict[Any, nn.Parameter], alone: bool = False) -> Lifted:
    """The program with shards for arguments, layers called with their weights, and local results.

    ``alone``: there is one rank and no gradient, so that nothing has to be moved between ranks.
    """
    graph = Graph()
    lifted = Lifted(program)
    nodes: dict[Node, Any] = {}
    shards = _parameter_nodes(program, parameters, graph, lifted)
    for position, node in enumerate(program.graph.find_nodes(op="placeholder")):
        if node.target in parameters:
            lifted.arguments[position] = parameters[node.target]
            continue
        if node.users:
            nodes[node] = graph.placeholder(str(node.target))
            nodes[node].meta = dict(node.meta)
            lifted.inputs.append(position)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            graph.output(tuple(_results(node, nodes, lifted)))
        elif node.op == "call_module":
            layer = program.get_submodule(str(node.target))
            held = [p for p in layer.parameters() if isinstance(p, ShardedTensor)]
            args = [nodes[a] if isinstance(a, Node) else a for a in node.args]
            call = aten.linear.default if _is_plain(layer) else _layer_call(layer, held, str(node.target))
            nodes[node] = graph.call_function(call, (*args, *(shards[id(p)] for p in held)))
            nodes[node].meta = dict(node.meta)
        elif alone and getattr(node.target, "__module__", "") == "paraxis" and _name(node) in REDISTRIBUTIONS:
            nodes[node] = nodes[node.args[0]]  # type: ignore[index]
        elif node.target is unwrap:
            (source,) = node.args
            assert isinstance(source, Node)
            nodes[node] = shards[id(parameters[source.target])] if source.target in parameters else nodes[source]
        else:
            nodes[node] = graph.node_copy(node, lambda n: nodes[n])
        if node.op == "call_function" and (node.meta.get("writes") or mutated(node) is not None):
            _note_written(node, program, lifted)
    lifted.program = GraphModule(program, graph, class_name="LocalTensors")
    return lifted


def _parameter_nodes(
    program: GraphModule, parameters: dict[Any, nn.Parameter], graph: Graph, lifted: Lifted
) -> dict[int, Node]:
    """A placeholder for the shard of every parameter that the program uses, by the parameter's identity."""
    used: dict[int, nn.Parameter] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.target in parameters and node.users:
            used[id(parameters[node.target])] = parameters[node.target]
        elif node.op == "call_module":
            for parameter in program.get_submodule(str(node.target)).parameters():
                if isinstance(parameter, ShardedTensor):
                    used[id(parameter)] = parameter  # type: ignore[assignment]
    lifted.parameters = list(used.values())
    return {key: graph.placeholder(f"shard_{i}") for i, key in enumerate(used)}


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "")


def _is_plain(layer: nn.Module) -> bool:
    """Whether a parallel layer does no more than its product."""
    if isinstance(layer, ColumnParallelLinear):
        moves = layer.gather_output or layer.copy_input or layer.sequence_parallel
    elif isinstance(layer, RowParallelLinear):
        moves = not layer.input_is_parallel or layer.reduce_output or layer.sequence_parallel
    else:
        return False
    return not moves and not layer.transposed and layer.bias is None


def _layer_call(layer: nn.Module, held: list[Any], name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        count = len(args) - len(held)
        with override_shards(held, args[count:]):
            return layer(*args[:count])

    call.__name__ = call.__qualname__ = name.replace(".", "_")
    call.__module__ = "paraxis"
    return call


def _results(node: Node, nodes: dict[Node, Any], lifted: Lifted) -> list[Any]:
    """The tensors and numbers to return; how they are arranged and wrapped is left with ``lifted``."""
    flat: list[Any] = []

    def leave(result: Node) -> Any:
        if result.op == "call_function" and getattr(result.target, "__name__", "") == "keep_sharded":
            lifted.wrappers[len(flat)] = result.target  # type: ignore[assignment]
            result = result.args[0]  # type: ignore[assignment]
        flat.append(nodes[result])
        return _At(len(flat) - 1)

    lifted.results = torch.fx.map_arg(node.args[0], leave)
    return flat


def _note_written(node: Node, program: GraphModule, lifted: Lifted) -> None:
    base = node.args[0]
    while isinstance(base, Node) and base.op == "call_function":
        base = base.args[0]
    if isinstance(base, Node) and base.op == "placeholder":
        lifted.written.add(program.graph.find_nodes(op="placeholder").index(base))


def _describe(lifted: Lifted) -> None:
    """Say what Dynamo would: which arguments stay where they are in memory, so that CUDA graphs need not copy them."""
    module = lifted.program
    module.meta["dynamo_compile_id"] = "paraxis"
    sources = {name: LocalSource(name) for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    module._param_name_to_source = sources  # type: ignore[assignment]
    first = len(lifted.parameters)
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        node._dynamo_source = LocalSource(f"argument_{i}")
        if i < first or lifted.inputs[i - first] in lifted.written:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
