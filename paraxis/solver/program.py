"""The ATen graph as the solver sees it: steps that take and make values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..compat.torch import pytree
from ..graph.mutation import IN_PLACE, written_input
from ..placement import Placement
from ..rules import Call, Tensor

aten = torch.ops.aten
_UNCHANGED = {aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default}


@dataclass(frozen=True)
class Value:
    """One tensor: the node that makes it and, for nodes with several results, which of them."""

    node: Node
    index: int = 0


@dataclass(eq=False)
class Step:
    """A node that the solver has to place: an operator call, or the return (``call is None``)."""

    node: Node
    call: Call | None
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def impure(self) -> bool:
        """Whether the step has a side effect."""
        return bool(self.node.meta.get("impure"))

    @property
    def home(self) -> Value | None:
        """The input of the graph that this step writes its result into; None if it writes to none."""
        node = written_input(self.node) if IN_PLACE in self.node.meta else None
        return Value(node) if node is not None else None


@dataclass(frozen=True)
class Encoded:
    """What the solver knows of a quantized parameter.

    Attributes:
        itemsize: Bytes per element, scales included.
        units: By dimension: (indices that cannot be separated, indices that have one scale).
    """

    itemsize: float
    units: Mapping[int, tuple[int, int]]


class Program:
    """Steps, leaves and parameters of an ATen graph.

    Args:
        graph: The ATen graph; every node has its fake tensor in ``meta["val"]``.
        parameters: Placeholder (or attribute) nodes that are parameters, with their names.
        placements: Known placements of leaves; other leaves are replicated.
        world: The number of ranks.
        encodings: Parameters that are quantized: what they take, and in which units they are split.
    """

    def __init__(
        self,
        graph: GraphModule,
        parameters: Mapping[Node, str],
        placements: Mapping[Node, Placement],
        world: int,
        encodings: Mapping[Node, Encoded] | None = None,
    ) -> None:
        self.graph = graph
        self.encodings = {Value(node): encoded for node, encoded in (encodings or {}).items()}
        self.parameters = {Value(node): name for node, name in parameters.items()}
        self.placements = {Value(node): placement for node, placement in placements.items()}
        self.world = world
        self.steps: list[Step] = []
        self.leaves: list[Value] = []
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                if isinstance(tensor_of(node), torch.Tensor):
                    self.leaves.append(Value(node))
            elif node.op == "output":
                values = tuple(value_of(n) for n in pytree.tree_leaves(node.args) if is_tensor(n))
                self.steps.append(Step(node, None, values, ()))
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._add(node)
        self.weights = set(self.parameters)
        """Parameters and what is computed from parameters alone: views and casts of them."""
        for step in self.steps:
            if step.inputs and self.weights.issuperset(step.inputs):
                self.weights.update(step.outputs)
        for step in self.steps:
            self._follow_encoding(step)
        self.learned = set(self.parameters)
        """Parameters and all values that depend on one: those that have a gradient in training."""
        for step in self.steps:
            if not self.learned.isdisjoint(step.inputs):
                self.learned.update(step.outputs)

    def _follow_encoding(self, step: Step) -> None:
        """A transposed quantized parameter is split in the same units."""
        encoded = self.encodings.get(step.inputs[0]) if step.call is not None and len(step.inputs) == 1 else None
        if encoded is None or step.call is None:
            return
        order = permutation(step.call)
        if order is not None:
            units = {i: encoded.units[dim] for i, dim in enumerate(order) if dim in encoded.units}
            self.encodings[step.outputs[0]] = Encoded(encoded.itemsize, units)

    def _add(self, node: Node) -> None:
        results = node.meta.get("val")
        tensors = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
        if not tensors or node.target is torch.ops.aten.sym_size.int:
            return
        inputs: list[Value] = []
        specs: list[Tensor] = []

        def abstract(arg: Any) -> Any:
            if not is_tensor(arg):
                return arg.meta.get("val", arg) if isinstance(arg, Node) else arg
            fake = tensor_of(arg)
            inputs.append(value_of(arg))
            encoded = self.encodings.get(inputs[-1])
            itemsize = None if encoded is None else encoded.itemsize
            specs.append(Tensor(len(specs), tuple(fake.shape), fake.dtype, itemsize))
            return specs[-1]

        args, kwargs = pytree.tree_map(abstract, (tuple(node.args), dict(node.kwargs)))
        outputs = tuple(Tensor(i, tuple(t.shape), t.dtype) for i, t in enumerate(tensors))
        call = Call(node.target, args, kwargs, tuple(specs), outputs, world=self.world)
        values = tuple(Value(node, i) for i in range(len(tensors)))
        self.steps.append(Step(node, call, tuple(inputs), values))


def permutation(call: Call) -> list[int] | None:
    """Which dimension of its input each dimension of a result is, for operators that permute dimensions."""
    ndim = call.inputs[0].ndim
    order = list(range(ndim))
    if call.target is aten.permute.default:
        return [dim % ndim for dim in call.args[1]]
    if call.target is aten.transpose.int:
        a, b = call.args[1] % ndim, call.args[2] % ndim
        order[a], order[b] = b, a
        return order
    if call.target in (aten.t.default, aten.numpy_T.default, aten.mT.default) and ndim >= 2:
        order[-1], order[-2] = order[-2], order[-1]
        return order
    return order if call.target in _UNCHANGED else None


def tensor_of(node: Node) -> Any:
    """The (fake) tensor a node stands for."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        root: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            root = getattr(root, part)
        node.meta["val"] = value = root
    return value


def is_tensor(arg: Any) -> bool:
    """Whether an argument is a node that stands for a tensor."""
    return isinstance(arg, Node) and isinstance(tensor_of(arg), torch.Tensor)


def value_of(node: Node) -> Value:
    """The value behind a node, looking through ``getitem``."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, Node) and isinstance(index, int)
        results = source.meta["val"]
        before = [isinstance(t, torch.Tensor) for t in results[:index]]
        return Value(source, sum(before))
    return Value(node)


def hint(size: Any) -> int:
    """A number for a size that may be symbolic: only for costs."""
    if isinstance(size, int):
        return size
    value = size.node.hint
    return int(value) if value is not None else 1
