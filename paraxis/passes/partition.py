"""Partitioning: from the global program and its solution to the local program of one rank.

The solution says, for every operator, the placements of its inputs and outputs. The partitioner goes through the ATen
graph once, holds for every value the versions of it that exist (as computed, all-gathered, shared, ...), makes a
missing version by a redistribution (:mod:`paraxis.distributed.operators`), and emits each operator with local sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from ..capture import mark_output_op
from ..compat.torch import OpOverload, is_grad_mode_switch, schema_or_none
from ..context import ParallelExecutionCtx
from ..distributed.consensus import is_rank0_only
from ..distributed.operators import COLLECTIVES, encode, redistribution
from ..distributed.random import RandomState
from ..graph.local_program import COLLECTIVE, FULL, INFO, REGION, Collective, ProgramInfo, region_of
from ..graph.mutation import IN_PLACE, has_side_effect, is_view, mutated
from ..graph.nodes import captured_module_of
from ..placement import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from ..rules import Strategy
from ..solver import Step, Value
from ..solver.program import is_tensor, tensor_of, value_of
from ..tensor.graph_io import wrap_shard, write_shard
from ..tensor.sharded_tensor import unwrap
from .layers import Layer, find_layers
from .local_layers import make_layer
from .reasons import reason_for
from .solve import Solved

aten = torch.ops.aten


class Partitioner:
    """Builds the local program of one rank from a solved graph."""

    def __init__(self, solved: Solved, ctx: ParallelExecutionCtx, grad: bool) -> None:
        self.solved, self.ctx, self.grad = solved, ctx, grad
        self.group, self.rank = ctx.tp_group, ctx.rank
        self.root = nn.Module()
        self.graph = Graph()
        self.modules: dict[str, nn.Module] = {}
        self.computed: dict[Value, Placement] = {}
        """The placement that a value is computed with."""
        self.versions: dict[Value, dict[Placement, Node]] = {}
        """The nodes that hold a value, by placement."""
        self.nodes: dict[Node, Node] = {}
        self.steps = {step.node: step for step in solved.program.steps}
        self.layers = {layer.step: layer for layer in find_layers(solved)}
        self.info = ProgramInfo()
        self._producers = {value: step for step in solved.program.steps for value in step.outputs}
        self._consumer: Step | None = None
        self._memory: set[Node] = set()
        """Nodes that are the memory of an input, written to or not."""

    def run(self) -> GraphModule:
        """The local program, with the placeholders of the captured graph."""
        for node in self.solved.aten.graph.nodes:
            emit: Callable[[Node], None] = getattr(self, f"_emit_{node.op}")
            before = next(iter(reversed(self.graph.nodes)), None)
            emit(node)
            self._note_region(node, before)
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output") or has_side_effect(n))
        module = GraphModule(self.root, self.graph, class_name="LocalProgram")
        module.meta[INFO] = self.info
        return module

    def _note_region(self, node: Node, before: Node | None) -> None:
        """Note on the nodes that were emitted for this one which checkpointed region they are of."""
        region = region_of(node.meta.get("origin"))
        if region is None:
            return
        for emitted in reversed(self.graph.nodes):
            if emitted is before:
                break
            emitted.meta[REGION] = region

    # -- inputs ------------------------------------------------------------------------------------------------

    def _emit_placeholder(self, node: Node) -> None:
        """An input; of a sharded tensor the shard."""
        origin = node.meta["origin"]
        new = self.graph.placeholder(str(origin.target))
        self.nodes[node] = new
        if not is_tensor(node):
            return
        value = Value(node)
        placement: Placement = REPLICATE
        parameter = self.solved.parameters.get(node)
        if parameter is not None and parameter.meta is not None:
            placement = self.solved.solution.parameters.get(value, REPLICATE)
            new = self.graph.call_function(unwrap, (new,))
        elif value in self.solved.program.placements:
            placement = self.solved.program.placements[value]
            new = self.graph.call_function(unwrap, (new,))
        self._define(value, placement, new)
        self._memory.add(new)

    def _emit_get_attr(self, node: Node) -> None:
        """A constant tensor, replicated."""
        name = str(node.target)
        value = tensor_of(node)
        owner = self.solved.aten
        for part in name.split("."):
            owner = getattr(owner, part)
        setattr(self.root, name.replace(".", "_"), owner)
        new = self.graph.get_attr(name.replace(".", "_"))
        self.nodes[node] = new
        if isinstance(value, torch.Tensor):
            self._define(Value(node), REPLICATE, new)

    # -- operators ---------------------------------------------------------------------------------------------

    def _emit_call_function(self, node: Node) -> None:
        """An operator, or a size."""
        if node.target is operator.getitem:
            return  # emitted with the operator that returns several tensors
        step = self.steps.get(node)
        if step is not None:
            self._emit_step(step, self.solved.solution.strategies[step])
        elif node.target is aten.sym_size.int and is_tensor(node.args[0]):
            self.nodes[node] = self._global_size(value_of(node.args[0]), int(node.args[1]))  # type: ignore[arg-type]
        else:
            args, kwargs = self._plain((node.args, node.kwargs))
            self.nodes[node] = self.graph.call_function(node.target, tuple(args), dict(kwargs))  # type: ignore[arg-type]
            if is_grad_mode_switch(node.target):
                self._forget_versions()

    def _emit_step(self, step: Step, strategy: Strategy) -> None:
        """An operator that the solver has placed, with its inputs redistributed to the placements that it needs."""
        self._consumer = step
        locals_ = [self.fetch(v, p) for v, p in zip(step.inputs, strategy.inputs, strict=True)]
        if step.node.target is mark_output_op:  # it requires a replicated input, which is its result
            self.nodes[step.node] = locals_[0]
            self._define(step.outputs[0], strategy.outputs[0], locals_[0])
            return
        layer = self.layers.get(step)
        new = self._emit_layer(layer, strategy) if layer is not None else None
        if new is None:
            new = self._emit_operator(step, strategy, locals_)
        new.meta.update({k: v for k, v in step.node.meta.items() if k in ("stack_trace", "nn_module_stack", "val")})
        new.meta["placement"] = strategy.outputs
        self.nodes[step.node] = new
        several = isinstance(step.node.meta["val"], (tuple, list))
        tensors = [i for i, v in enumerate(step.node.meta["val"]) if isinstance(v, torch.Tensor)] if several else [0]
        for value, position, placement in zip(step.outputs, tensors, strategy.outputs, strict=True):
            item = self.graph.call_function(operator.getitem, (new, position)) if several else new
            self._define(value, placement, item)
        if step.impure:
            self._write_back(step.node, strategy)
        elif step.home is not None and new not in self._memory:
            place = self.computed[step.home]
            source = self.fetch(step.outputs[0], place)
            written = (self.versions[step.home][place], source)
            self.graph.call_function(aten.copy_.default, written).meta["writes"] = True

    def _write_back(self, node: Node, strategy: Strategy) -> None:
        """Bring a write into a sharded input (a KV cache) to its shard, and drop versions from before the write."""
        target = mutated(node)
        base = target
        while base is not None and base.op == "call_function" and (is_view(base) or mutated(base) is not None):
            base = base.all_input_nodes[0]
        if base is None or base.op != "placeholder":
            return
        value, placement = Value(base), self.computed[Value(base)]
        if not _is_sharded(placement):
            return
        if base is target and strategy.inputs[0] == placement:  # the operator writes to the shard
            self.versions[value] = {placement: self.versions[value][placement]}
            return
        local, full = (self.versions[value][p] for p in (placement, REPLICATE))
        args = (local, full, encode(placement), self.group.group_name)
        self.graph.call_function(write_shard, args).meta["writes"] = True

    def _emit_operator(self, step: Step, strategy: Strategy, locals_: list[Node]) -> Node:
        """The operator on local tensors, with local sizes."""
        taken = iter(locals_)

        def local(arg: Any) -> Any:
            return next(taken) if is_tensor(arg) else self.nodes[arg] if isinstance(arg, Node) else arg

        args: Any = list(torch.fx.map_arg(step.node.args, local))
        kwargs: Any = dict(torch.fx.map_arg(step.node.kwargs, local))
        target: Any = step.node.target
        if target is aten.view.default:
            target = aten.reshape.default  # a gathered or sliced tensor may not be contiguous
        in_place = IN_PLACE in step.node.meta and strategy.localize is None and not is_random(step.node)
        if in_place and locals_[0] in self._memory:
            node = self.graph.call_function(step.node.meta[IN_PLACE], tuple(args), kwargs)
            self._memory.add(node)
            return node
        if strategy.localize is not None:
            target, args, kwargs = strategy.localize(target, args, kwargs, self.rank)
        if is_random(step.node):
            return self._emit_random(target, strategy.is_sharded, tuple(args), kwargs)
        printable = isinstance(target, OpOverload) or getattr(target, "__module__", "") == "paraxis"
        if not printable and hasattr(target, "__name__"):
            target = _printable(target)
        return self.graph.call_function(target, tuple(args), kwargs)

    def _emit_random(self, target: Any, sharded: bool, args: tuple[Any, ...], kwargs: Any) -> Node:
        """A random operator, which draws from the state of the program."""
        if self.info.random is None:
            self.info.random = RandomState(
                self.group, self.ctx.current_device, self.ctx.dp_rank, agreed=not is_rank0_only()
            )
        seeded = SeededOperator(self.info.random, target, sharded)
        node = self.graph.call_function(seeded, args, kwargs)
        node.meta["random"] = target  # random operators must stay in order
        self.info.order.append(seeded.__name__)
        return node

    def _emit_layer(self, layer: Layer, strategy: Strategy) -> Node | None:
        """A call of the parallel layer; None if the layer must stay an operator."""
        made = make_layer(layer, strategy, self.solved, self.ctx)
        if made is None:
            return None
        path, module = made
        self.info.order.append(f"{path} {[str(p) for p in (*strategy.inputs, *strategy.outputs)]}")
        while self.modules.setdefault(path, module) is not module:
            path += "_"
        _add_submodule(self.root, path, module)
        i = layer.step.inputs.index(layer.data)
        args = [self.fetch(layer.data, strategy.inputs[i])]
        if layer.kind == "cross_entropy":
            args += map(self.fetch, layer.step.inputs[1:], strategy.inputs[1:])  # targets, perhaps class weights
        return self.graph.call_module(path, tuple(args))

    # -- results -----------------------------------------------------------------------------------------------

    def _emit_output(self, node: Node) -> None:
        """The results; sharded ones leave as sharded tensors."""
        results = iter(self.solved.solution.results)
        self._consumer = None

        def leave(arg: Node) -> Any:
            if not is_tensor(arg):
                return self.nodes[arg]
            value, placement = value_of(arg), next(results)
            local = self.fetch(value, placement)
            if not isinstance(placement, Shard):
                return local
            shape = tuple(n if isinstance(n, int) else -1 for n in tensor_of_value(value).shape)
            return self.graph.call_function(wrap_shard, (local, encode(placement), shape, self.group.group_name))

        self.graph.output(torch.fx.map_arg(node.args[0], leave))

    # -- versions ----------------------------------------------------------------------------------------------

    def _define(self, value: Value, placement: Placement, node: Node) -> None:
        """Note the node that computes a value."""
        self.computed[value] = placement
        self.versions[value] = {placement: node}

    def _forget_versions(self) -> None:
        """Drop redistributed versions: one from where gradients are off must not be used where they are on."""
        for value, placement in self.computed.items():
            self.versions[value] = {placement: self.versions[value][placement]}

    def fetch(self, value: Value, need: Placement) -> Node:
        """The local tensor of a value in a placement, redistributed unless that version exists."""
        versions = self.versions[value]
        if need in versions:
            return versions[need]
        source = REPLICATE if REPLICATE in versions else self._nearest_version(value)
        direct = isinstance(source, Replicate) or (isinstance(source, Partial) and _is_sharded(need))
        shared = isinstance(source, Shard) and not source.layouts
        if need != REPLICATE and not direct and not (shared and need != PARTIAL):
            self.fetch(value, REPLICATE)
            return self.fetch(value, need)
        node = versions[source]
        if not self._is_free(value, source, need):
            node = self._redistribute(value, node, source, need)
        versions[need] = node
        return node

    def _nearest_version(self, value: Value) -> Placement:
        """What a missing version is redistributed from: the placement it was computed with or, if that is partial and
        was reduce-scattered already, the shards."""
        computed = self.computed[value]
        if isinstance(computed, Partial):
            return next((p for p in self.versions[value] if _is_sharded(p)), computed)
        return computed

    def _is_free(self, value: Value, source: Placement, need: Placement) -> bool:
        """Whether a redistribution does nothing: replicated and shared tensors differ in their gradients alone."""
        both = {type(source), type(need)} == {Replicate, Shard} and not _is_sharded(source) and not _is_sharded(need)
        fake = tensor_of_value(value)
        return both and not (self.grad and (fake.dtype.is_floating_point or fake.dtype.is_complex))

    def _redistribute(self, value: Value, node: Node, source: Placement, need: Placement) -> Node:
        """Emit a redistribution, and note the collective and its reason."""
        fake = tensor_of_value(value)
        shape = tuple(n if isinstance(n, int) else None for n in fake.shape)
        operator_, args = redistribution(source, need, shape, self.group.group_name)
        module = captured_module_of(value.node)
        self.info.order.append(f"{operator_} {module} {shape} {fake.dtype} {source} {need}")
        moved = self.graph.call_function(operator_, (node, *args))
        moved.meta["placement"] = (need,)
        moved.meta[FULL] = fake
        if operator_ in COLLECTIVES and self.ctx.world_size > 1:
            producer = self._producers.get(value)
            reason = reason_for(source, producer, self.layers.get(producer) if producer else None, self._consumer)
            dtype = str(fake.dtype).removeprefix("torch.")
            collective = Collective(COLLECTIVES[operator_], module, shape, dtype, reason)
            self.info.collectives.append(collective)
            moved.meta[COLLECTIVE] = collective
        return moved

    def _global_size(self, value: Value, dim: int) -> Node:
        """The global size of a dimension, from the local tensor."""
        placement = self.computed[value]
        local = self.graph.call_function(aten.sym_size.int, (self.versions[value][placement], dim))
        layout = placement.dims.get(dim) if isinstance(placement, Shard) else None
        if layout is None:
            return local
        held = layout.local_size(layout.period, self.rank)
        repeats = self.graph.call_function(operator.floordiv, (local, held))
        return self.graph.call_function(operator.mul, (repeats, layout.period))

    def _plain(self, tree: Any) -> Any:
        """The arguments of a node that is no solved operator, with full tensors."""
        return torch.fx.map_arg(tree, lambda n: self.fetch(value_of(n), REPLICATE) if is_tensor(n) else self.nodes[n])


# -- small helpers ---------------------------------------------------------------------------------------------


def _is_sharded(placement: Placement) -> bool:
    """Whether some dimension is sharded: a shard without any is a shared tensor."""
    return isinstance(placement, Shard) and bool(placement.layouts)


class SeededOperator:
    """A random operator that draws from the state of the program: ranks agree where its result is replicated."""

    def __init__(self, state: RandomState, target: Any, sharded: bool) -> None:
        self.state, self.target, self.sharded = state, target, sharded
        self.__name__ = self.__qualname__ = f"random_{_name(target)}"
        self.__module__ = "paraxis"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Draw, and advance the state."""
        return self.state.run(self.target, self.sharded, *args, **kwargs)


def _printable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A local function of a rule under a name that generated code can use."""
    name = function.__name__
    if isinstance(function, FunctionType) and function.__kwdefaults__ is None:  # a copy costs no extra call
        inside = function.__globals__, name, function.__defaults__, function.__closure__
        call: Callable[..., Any] = FunctionType(function.__code__, *inside)
    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__ = "paraxis"
    return call


def _name(target: Any) -> str:
    schema = schema_or_none(target)
    return schema.name.split("::")[1] if schema is not None else getattr(target, "__name__", "function")


def is_random(node: Node) -> bool:
    """Whether the operator draws random numbers in this call."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target is aten.dropout.default:
        return bool(node.args[2]) and bool(node.args[1])
    if target is aten.scaled_dot_product_attention.default:
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(dropout)
    return True


def _add_submodule(root: nn.Module, path: str, module: nn.Module) -> None:
    """Add a layer under its path in the model, creating the modules above it."""
    *parents, leaf = path.split(".")
    for part in parents:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    root.add_module(leaf, module)


def tensor_of_value(value: Value) -> Any:
    """The fake tensor of a value."""
    result = tensor_of(value.node)
    if isinstance(result, (tuple, list)):
        return [t for t in result if isinstance(t, torch.Tensor)][value.index]
    return result
