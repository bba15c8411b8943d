"""Running the local program of a rank through Inductor, with CUDA graphs where asked for.

The local program takes what the captured graph took: sharded parameters and caches, plain tensors, numbers. Inductor
must see local tensors only. So the program is taken in three: the shards of the inputs and of the parameters are taken
out (:func:`lift`), the plain program in the middle is compiled, and results that stay sharded are wrapped again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import Graph, GraphModule, Node

from .capture.functionalize import mutated
from .distributed.collectives import backend_of
from .passes.grouped import open_single_query_attention
from .sharded import ShardedTensor, shards_of, unwrap


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
    inputs: list[int] = field(default_factory=list)
    """Then these of the caller's arguments, or their shards."""
    written: set[int] = field(default_factory=set)
    """Those of the caller's arguments that the program writes to: caches of a fixed size."""
    wrappers: dict[int, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """By position among the results: what makes a sharded tensor of it again."""
    results: Any = None
    """The structure of the results, with positions for tensors."""


def compile_local(
    program: GraphModule, captured: GraphModule, parameters: dict[Any, nn.Parameter], options: dict[str, Any]
) -> Callable[..., Any]:
    """The local program of a captured graph, compiled with Inductor's ``options``.

    ``parameters`` are the sharded ones by the placeholder that brings them in.

    A program that draws random numbers is returned as it is, with a word in the log: every rank draws from a state of
    its own for what is split and from a common one for what is not, which Inductor's generator cannot express.
    """
    from torch._inductor.compile_fx import compile_fx

    if any(node.meta.get("random") for node in program.graph.nodes):
        logging.getLogger("paraxis").info("a graph with random draws (dropout) is not compiled by Inductor")
        return program
    lifted = lift(program, parameters)
    given = [node.meta["example_value"] for node in captured.graph.find_nodes(op="placeholder")]
    fake_mode = detect_fake_mode([x for x in given if isinstance(x, torch.Tensor)])
    assert fake_mode is not None, "a graph is compiled for fake inputs"
    grad = torch.is_grad_enabled()
    shards = [fake_mode.from_tensor(p._local, static_shapes=True) for p in lifted.parameters]  # type: ignore[attr-defined]
    for shard, parameter in zip(shards, lifted.parameters, strict=True):
        shard.requires_grad_(grad and parameter.requires_grad)
    examples = [*shards, *(_plain(given[i]) for i in lifted.inputs)]
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in examples) and not grad:
        open_single_query_attention(lifted.program)
    _describe(lifted)
    dynamic = any(isinstance(x, torch.SymInt) for x in examples)
    patches = {**options, "triton.cudagraphs": bool(options.get("triton.cudagraphs")) and not dynamic}
    with tracing(TracingContext(fake_mode)):
        compiled = compile_fx(lifted.program, examples, config_patches=patches)
    return _caller(lifted, _kept(compiled) if patches["triton.cudagraphs"] else compiled)


def _kept(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Results in memory of their own: that of a CUDA graph is used again by the next call, and a cache must live on."""

    def run(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return [x.clone() if isinstance(x, torch.Tensor) else x for x in compiled(*args)]

    return run


def _caller(lifted: Lifted, compiled: Callable[..., Any]) -> Callable[..., Any]:
    sharded, inputs, wrappers = lifted.parameters, lifted.inputs, lifted.wrappers

    def run(*args: Any) -> Any:
        if torch.is_grad_enabled():
            flat = [unwrap(p) for p in sharded] + [unwrap(args[i]) for i in inputs]
        else:
            flat = [p._local for p in sharded]  # type: ignore[attr-defined]
            flat += [x._local if isinstance(x := args[i], ShardedTensor) else x for i in inputs]
        results = compiled(*flat)
        if wrappers:
            results = [wrappers[i](x) if i in wrappers else x for i, x in enumerate(results)]
        return torch.fx.node.map_aggregate(lifted.results, lambda x: results[x.position] if type(x) is _At else x)

    return run


@dataclass(frozen=True)
class _At:
    """A place among the results."""

    position: int


def _plain(value: Any) -> Any:
    return value._local if isinstance(value, ShardedTensor) else value


# -- taking the shards out -----------------------------------------------------------------------------------------


def lift(program: GraphModule, parameters: dict[Any, nn.Parameter]) -> Lifted:
    """The program with shards for arguments, layers called with their weights, and local results."""
    graph = Graph()
    lifted = Lifted(program)
    nodes: dict[Node, Any] = {}
    shards = _parameter_nodes(program, parameters, graph, lifted)
    for position, node in enumerate(program.graph.find_nodes(op="placeholder")):
        if node.target in parameters:
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
            call = _layer_call(layer, held, str(node.target))
            nodes[node] = graph.call_function(call, (*args, *(shards[id(p)] for p in held)))
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


def _layer_call(layer: nn.Module, held: list[Any], name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        count = len(args) - len(held)
        with shards_of(held, args[count:]):
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
