"""Positions and counters of a decode step: fewer kernels for tensors of one element."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ...graph.match import Capture, Op, Where, matches
from ..patterns import dtype_of, is_input, is_position, range_of, tensor_of

aten = torch.ops.aten


def decompose_outer_products(graph: Graph) -> None:
    """Make a matmul over a single element an elementwise product, which Inductor fuses with its neighbours."""
    for target in (aten.matmul.default, aten.bmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            a, b = (tensor_of(arg) for arg in node.args)
            if a is not None and b is not None and _is_outer_product(a, b):
                node.target = aten.mul.Tensor


def _is_outer_product(a: torch.Tensor, b: torch.Tensor) -> bool:
    return min(a.dim(), b.dim()) >= 2 and a.shape[-1] == 1 and b.shape[-2] == 1 and a.dtype == b.dtype


def merge_counter_increments(graph: Graph, together: bool = True) -> None:
    """Increment all counters of the program (each layer's KV cache has one) by one operator, at the end.

    Without ``together``, at the end as well, but each by an operator of its own.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    merged: dict[tuple[int, torch.dtype], list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        counter, step = node.args[0], node.args[1]
        value = tensor_of(counter)
        if node.users or node.kwargs or not isinstance(step, int) or value is None or value.numel() != 1:
            continue
        aliases = aliases_of_input(counter)
        if aliases is not None and all(order[user] <= order[node] for alias in aliases for user in alias.users):
            merged.setdefault((step, value.dtype), []).append(node)
    end = graph.output_node()
    for (step, _), nodes in merged.items():
        with graph.inserting_before(end):
            for group in [nodes] if together else [[node] for node in nodes]:
                graph.call_function(aten._foreach_add_.Scalar, ([node.args[0] for node in group], step))
        for node in nodes:
            graph.erase_node(node)


def aliases_of_input(node: Any) -> list[Node] | None:
    """All nodes that are the same memory as ``node``: an input, and conversions that return it unchanged.

    None if the node is no input, or a conversion that copies.
    """
    base = node
    while isinstance(base, Node) and _is_conversion(base):
        base = base.args[0]
    if not is_input(base):
        return None
    aliases = [base]
    for alias in aliases:
        aliases += [user for user in alias.users if _is_conversion(user) and dtype_of(user) == dtype_of(node)]
    return aliases if node in aliases else None


def _is_conversion(node: Node) -> bool:
    """Whether a node is one of the overloads of ``Tensor.to``."""
    return node.op == "call_function" and getattr(node.target, "overloadpacket", None) is aten.to


_FIRST_POSITION = Op(aten.add.Tensor, range_of(1), Capture("position", Where(is_position)), commutes=True)
"""``arange(1) + position``"""


def simplify_position(graph: Graph, node: Node) -> None:
    """Replace ``arange(1) + position`` by ``position``: one kernel less for every layer with a counter of its own."""
    for found in matches(_FIRST_POSITION, node):
        position = found["position"]
        if is_written(position):
            continue
        with graph.inserting_before(node):
            same = graph.call_function(aten.reshape.default, (position, [1]))
        same.meta["val"] = node.meta.get("val")
        node.replace_all_uses_with(same)
        return


def is_written(counter: Node) -> bool:
    """Whether a counter changes before the end of the program: an alias of it would change too."""
    aliases = aliases_of_input(counter) or [counter]
    users = [user for alias in aliases for user in alias.users]
    return any(user.is_impure() and user.target is not aten._foreach_add_.Scalar for user in users)
