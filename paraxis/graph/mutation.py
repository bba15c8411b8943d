"""Which tensors a node of an ATen graph writes to or aliases."""

from __future__ import annotations

import operator

from torch.fx import Node

from ..compat.torch import OpOverload, is_grad_mode_switch, operator_name, schema_of

IN_PLACE = "in_place"
"""In ``node.meta`` of a functional operator that replaces a write into an input: the operator that writes."""


def mutated(node: Node) -> Node | None:
    """The tensor that this node writes to, if it is the first argument."""
    first = node.args[0] if node.args else None
    if not isinstance(first, Node):
        return None
    if IN_PLACE in node.meta:
        return first
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    schema = schema_of(node.target)
    if not schema.is_mutable or not schema.arguments:
        return None
    info = schema.arguments[0].alias_info
    return first if info is not None and info.is_write else None


def written_input(node: Node) -> Node | None:
    """The input of the graph that a node is the latest value of, after writes into it; None if it is anything else."""
    while IN_PLACE in node.meta:
        written = node.args[0]
        assert isinstance(written, Node)
        node = written
    return node if node.op == "placeholder" else None


def is_view(node: Node) -> bool:
    """Whether the result may share memory with an argument."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    name = operator_name(node.target)
    if name in ("aten::reshape", "aten::contiguous", "aten::to", "aten::flatten", "aten::matmul", "aten::linear"):
        return name not in ("aten::matmul", "aten::linear")  # these may return an alias
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(node.target).returns)


def has_side_effect(node: Node) -> bool:
    """Whether a call must stay where it is: it writes to memory, or switches gradients on or off."""
    if node.op != "call_function":
        return False
    if node.meta.get("writes"):
        return True
    if isinstance(node.target, OpOverload):
        return bool(schema_of(node.target).is_mutable)
    return is_grad_mode_switch(node.target)
