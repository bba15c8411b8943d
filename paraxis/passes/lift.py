"""Lifting: the local program on plain tensors, which is what Inductor takes, and what is called for several blocks.

The inputs of the local program are those of the captured graph: sharded parameters and KV caches, plain tensors,
numbers. The inputs of the lifted one are the shards of the parameters, then the other inputs or their shards; its
results are local tensors. :class:`Lifted` says how to wrap them as sharded tensors, and the structure of the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from ..compat.dynamo import detect_fake_mode
from ..config import Config
from ..context import ParallelExecutionCtx
from ..graph.local_program import INFO, info_of
from ..graph.mutation import mutated
from ..kernels.cpu.gemv import linear
from ..layers import ColumnParallelLinear, RowParallelLinear
from ..optimize.prefill import move_scalars_to_device
from ..tensor.graph_io import wrap_shard
from ..tensor.sharded_tensor import ShardedTensor, override_shards, unwrap
from .base import PassBase
from .setting import Setting, compiles

LIFTED = "paraxis_lifted"
"""In ``graph_module.meta`` of a lifted program: its :class:`Lifted`."""

aten = torch.ops.aten


@dataclass
class Lifted:
    """Where the arguments of a lifted program come from and its results go.

    Attributes:
        source: The local program that was lifted.
        parameters: Their shards are the first arguments.
        arguments: The parameters among the caller's arguments, by position.
        inputs: The caller's arguments that are the next arguments, or whose shards are.
        examples: Fake tensors for all arguments of the lifted program.
        fake_mode: The mode of these fake tensors.
        device: Where the program runs.
        written: The caller's arguments that the program writes to: preallocated KV caches.
        scalars: Positions, among the inputs, of numbers on the host that are passed on the device.
        wrappers: By position among the results: the arguments of :func:`~paraxis.tensor.graph_io.wrap_shard`, after the
            local tensor.
        results: The structure of the results, with positions for tensors.
        inductor: Options for Inductor that passes have set.
    """

    source: GraphModule
    parameters: list[nn.Parameter] = field(default_factory=list)
    arguments: dict[int, nn.Parameter] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    examples: list[Any] = field(default_factory=list)
    fake_mode: Any = None
    device: torch.device | None = None
    written: set[int] = field(default_factory=set)
    scalars: list[int] = field(default_factory=list)
    wrappers: dict[int, tuple[str, tuple[int, ...], str]] = field(default_factory=dict)
    results: Any = None
    inductor: dict[str, Any] = field(default_factory=dict)

    @property
    def dynamic(self) -> bool:
        """Whether some input is a symbolic size: such a program cannot be captured as a CUDA graph."""
        return any(isinstance(x, torch.SymInt) for x in self.examples)


@dataclass(frozen=True)
class ResultAt:
    """A position among the results of a lifted program."""

    position: int


def lifted_of(program: GraphModule) -> Lifted:
    """Where the arguments of a lifted program come from and its results go."""
    lifted = program.meta.get(LIFTED)
    if not isinstance(lifted, Lifted):
        raise RuntimeError("this program is not lifted: compile='inductor' needs the pass 'lift' in the pipeline")
    return lifted


class LiftShardsPass(PassBase):
    """Shards become arguments and results, so that Inductor sees plain tensors alone."""

    name = "lift"

    def applies(self, setting: Setting) -> bool:
        """Whether Inductor compiles the program, or it is that of a model's first blocks."""
        return setting.lifts and not setting.searching

    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """A new graph module; ``meta[LIFTED]`` says where its arguments come from."""
        info, grad = info_of(graph_module), torch.is_grad_enabled()
        torchs = compiles(ctx, config) or ctx.current_device.type != "cpu"
        program, lifted = lift(graph_module, info.parameters, aten.linear.default if torchs else linear)
        lifted.fake_mode = detect_fake_mode([x for x in info.inputs if isinstance(x, torch.Tensor)])
        assert lifted.fake_mode is not None, "a graph is compiled for fake inputs"
        shards = [lifted.fake_mode.from_tensor(like_shard(p), static_shapes=True) for p in lifted.parameters]
        for shard, parameter in zip(shards, lifted.parameters, strict=True):
            shard.requires_grad_(grad and parameter.requires_grad)
        lifted.examples = [*shards, *(_local(info.inputs[i]) for i in lifted.inputs)]
        lifted.device, info.dynamic = ctx.current_device, lifted.dynamic
        program.meta[INFO], program.meta[LIFTED] = info, lifted
        return program


def like_shard(parameter: Any) -> torch.Tensor:
    """The shard that a program takes, or an empty tensor like it where data-parallel ranks shard it further (FSDP)."""
    local: torch.Tensor = parameter.local
    return local if parameter.dp_shard is None else local.new_empty(parameter.dp_shard.shape)


def _local(value: Any) -> Any:
    """The shard of a sharded tensor; any other value itself."""
    return value.local if isinstance(value, ShardedTensor) else value


def lift(
    program: GraphModule, parameters: dict[Any, nn.Parameter], matmul: Callable[..., Any] = aten.linear.default
) -> tuple[GraphModule, Lifted]:
    """The program with shards for arguments, layers called with their weights, and local results.

    ``matmul`` is called for parallel layers that do nothing else.
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
            weights = [p for p in layer.parameters() if isinstance(p, ShardedTensor)]
            args = [nodes[a] if isinstance(a, Node) else a for a in node.args]
            call = matmul if _is_matmul(layer) else LayerCall(layer, weights, str(node.target))
            nodes[node] = graph.call_function(call, (*args, *(shards[id(p)] for p in weights)))
            nodes[node].meta = dict(node.meta)
        elif node.target is unwrap:
            (source,) = node.args
            assert isinstance(source, Node)
            nodes[node] = shards[id(parameters[source.target])] if source.target in parameters else nodes[source]
        elif node.target is not wrap_shard or any(user.op != "output" for user in node.users):
            nodes[node] = graph.node_copy(node, lambda n: nodes[n])
        if node.op == "call_function" and (node.meta.get("writes") or mutated(node) is not None):
            _note_written(node, program, lifted)
    return GraphModule(program, graph, class_name="LiftedProgram"), lifted


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


def _is_matmul(layer: nn.Module) -> bool:
    """Whether a parallel layer does no more than its matmul."""
    if isinstance(layer, ColumnParallelLinear):
        communicates = layer.gather_output or layer.copy_input or layer.sequence_parallel
    elif isinstance(layer, RowParallelLinear):
        communicates = not layer.input_is_parallel or layer.reduce_output or layer.sequence_parallel
    else:
        return False
    return not communicates and not layer.transposed and layer.bias is None


class LayerCall:
    """A parallel layer as a function: of its own arguments, then the shards of its parameters."""

    def __init__(self, layer: nn.Module, weights: list[Any], name: str) -> None:
        self.layer, self.weights = layer, weights
        self.__name__ = self.__qualname__ = name.replace(".", "_")
        self.__module__ = "paraxis"

    def __call__(self, *args: Any) -> Any:
        """Call the layer with these shards in place of its parameters."""
        count = len(args) - len(self.weights)
        with override_shards(self.weights, args[count:]):
            return self.layer.forward(*args[:count])

    def does_the_same_as(self, other: Any) -> bool:
        """Whether another call computes the same from equal arguments: a layer of its kind, with equal options."""
        return isinstance(other, LayerCall) and _options(self.layer) == _options(other.layer)


def _options(layer: nn.Module) -> Any:
    """What a parallel layer's forward depends on besides its arguments and the values of its parameters."""
    own = {name: value for name, value in vars(layer).items() if name not in ("_parameters", "_modules", "_buffers")}
    parameters = {
        name: None if p is None else (tuple(p.shape), p.dtype, getattr(getattr(p, "spec", None), "placement", None))
        for name, p in layer.named_parameters()
    }
    return type(layer), own, parameters, [*layer.named_buffers()], [type(module) for module in layer.modules()]


def _results(node: Node, nodes: dict[Node, Any], lifted: Lifted) -> list[Any]:
    """The tensors and numbers to return. Their structure and wrappers are noted in ``lifted``."""
    flat: list[Any] = []

    def leave(result: Node) -> Any:
        if result.op == "call_function" and result.target is wrap_shard:
            lifted.wrappers[len(flat)] = result.args[1:]  # type: ignore[assignment]
            result = result.args[0]  # type: ignore[assignment]
        flat.append(nodes[result])
        return ResultAt(len(flat) - 1)

    lifted.results = torch.fx.map_arg(node.args[0], leave)
    return flat


def _note_written(node: Node, program: GraphModule, lifted: Lifted) -> None:
    """Note the input that a node writes to, if it writes to one."""
    base = node.args[0]
    while isinstance(base, Node) and base.op == "call_function":
        base = base.args[0]
    if isinstance(base, Node) and base.op == "placeholder":
        lifted.written.add(program.graph.find_nodes(op="placeholder").index(base))


def scalars_to_device(program: GraphModule) -> int:
    """Pass integers on the host, which the program only copies to the device, on the device; how many."""
    lifted = lifted_of(program)
    assert lifted.device is not None
    moved = move_scalars_to_device(program.graph, lifted.examples, lifted.device)
    lifted.scalars = [i - len(lifted.parameters) for i in moved]
    lifted.written -= {lifted.inputs[i] for i in lifted.scalars}
    program.recompile()
    return len(moved)
