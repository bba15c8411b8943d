"""Functionalizing the ATen graph where that is simple, and marking what stays impure.

A placement belongs to a value, so an operator that mutates its input is replaced by one that returns a new value, which
later nodes use, when nothing else reads the same memory. Where views are involved, all aliases are marked
(``meta["impure"]``) and the solver leaves them replicated: correct, and reported in the plan. A write to an input, such
as a preallocated KV cache, is in the graph as the operator that returns the new value; the mutating operator is
recorded with it (``meta["in_place"]``), and the local program writes to each rank's shard.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..compat.torch import OpOverload, is_grad_mode_switch, operator_name, overload_name, schema_of
from ..graph.mutation import IN_PLACE, is_view, mutated, written_input

aten = torch.ops.aten


def _functional(target: Any) -> Any:
    """``aten.add_.Tensor`` to ``aten.add.Tensor``; None if there is no such operator."""
    name = operator_name(target).removeprefix("aten::")
    if not name.endswith("_") or target.namespace != "aten":
        return None
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, overload_name(target), None) if packet is not None else None


def simplify(graph_module: GraphModule) -> GraphModule:
    """Normalize in place: functionalize simple mutations, replace constant indices by slices, drop dead nodes."""
    graph: Graph = graph_module.graph
    _purify(graph)
    _slice_constant_indices(graph_module)
    _drop_idle_dropout(graph)
    _drop_idle_casts(graph)
    graph.eliminate_dead_code(is_impure_node=_must_stay)
    graph_module.recompile()
    return graph_module


def _must_stay(node: Node) -> bool:
    """Whether a node stays although nobody uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    if IN_PLACE in node.meta:
        return True
    if isinstance(node.target, OpOverload):
        return bool(schema_of(node.target).is_mutable) or torch.Tag.nondeterministic_seeded in node.target.tags
    return node.target not in (operator.getitem,) and is_grad_mode_switch(node.target)


def _purify(graph: Graph) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        target = mutated(node)
        if target is None:
            continue
        family = _aliases(target)
        functional = _functional(node.target)
        others = _aliases(target, without=node)  # aliases of the new value only do not matter
        alone = all(n is target or not _used_after(n, node, order) for n in others)
        if functional is not None and alone and written_input(target) is not None:  # memory of the caller: a KV cache
            node.meta[IN_PLACE] = node.target
            node.target = functional
            target.replace_all_uses_with(node, delete_user_cb=_after(node, order))
        elif functional is not None and alone and target.op == "call_function" and not is_view(target):
            if node.target is aten.copy_.default:
                with graph.inserting_before(node):
                    value = _written(graph, node, target, order)
                    if value is node.args[1]:  # its own memory, as the target had
                        value = _like(graph.call_function(aten.clone.default, (value,)), target, node, order)
                node.replace_all_uses_with(value)
                target.replace_all_uses_with(value, delete_user_cb=_after(node, order))
                graph.erase_node(node)
                continue
            node.target = functional
            target.replace_all_uses_with(node, delete_user_cb=_after(node, order))
        elif not _functionalize_slice_write(graph, node, target, order):
            for member in family | {node}:
                member.meta["impure"] = True
                if IN_PLACE in member.meta:
                    member.target = member.meta.pop(IN_PLACE)


def _functionalize_slice_write(graph: Graph, node: Node, part: Node, order: dict[Node, int]) -> bool:
    """Replace ``x[..., :n].copy_(y)`` by a new value of ``x``; whether that was possible."""
    if node.target is not aten.copy_.default:
        return False
    chain, base = [], part
    while base.target in (aten.slice.Tensor, aten.select.int):
        chain.append(base)
        base = base.args[0]  # type: ignore[assignment]
    if not chain or base.op != "call_function" or is_view(base) or mutated(base) is not None:
        return False
    others = [n for n in _aliases(part, without=node) if n is not base and order[n] < order[node]]
    if any(_used_after(n, node, order) for n in others):
        return False  # an earlier alias of the same memory is read later
    with graph.inserting_before(node):
        value = _written(graph, node, part, order)
        written = value
        for view in chain:
            scatter = aten.slice_scatter.default if view.target is aten.slice.Tensor else aten.select_scatter.default
            parent, rest = view.args[0], view.args[1:]
            written = _like(graph.call_function(scatter, (parent, written, *rest)), parent, node, order)
    node.replace_all_uses_with(value)
    base.replace_all_uses_with(written, delete_user_cb=_after(node, order))
    graph.erase_node(node)
    return True


def _written(graph: Graph, node: Node, part: Node, order: dict[Node, int]) -> Node:
    """The value of ``part`` after a copy: the source in its shape and dtype, by differentiable operators."""
    source: Any = node.args[1]
    target, value = part.meta["val"], source.meta["val"]
    same_shape = list(map(str, value.shape)) == list(map(str, target.shape))  # by text: no guards on symbols
    if same_shape and value.dtype == target.dtype:
        return source  # type: ignore[no-any-return]
    zeros = _like(graph.call_function(aten.zeros_like.default, (part,)), part, node, order)
    if value.dtype != target.dtype:
        source = _like(graph.call_function(aten.to.dtype, (source, target.dtype)), source, node, order)
        source.meta["val"] = torch.empty_like(value, dtype=target.dtype)
    return _like(graph.call_function(aten.add.Tensor, (zeros, source)), part, node, order)


def _like(new: Node, shape_of: Any, written: Node, order: dict[Node, int]) -> Node:
    """A node with the metadata of the write it replaces and the value of another one."""
    new.meta = {**written.meta, "val": shape_of.meta["val"]}
    order[new] = order[written]
    return new


def _drop_idle_casts(graph: Graph) -> None:
    """Drop casts to the dtype that a tensor already has: norms are full of them."""
    for node in list(graph.nodes):
        if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
            source = node.args[0]
            value = source.meta.get("val") if isinstance(source, Node) else None
            if isinstance(value, torch.Tensor) and value.dtype == node.args[1]:
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _drop_idle_dropout(graph: Graph) -> None:
    """Drop dropout that is inactive: partial sums may then pass, without an all-reduce."""
    for node in list(graph.nodes):
        if node.target is aten.dropout.default and (not node.args[2] or node.args[1] == 0):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _after(point: Node, order: dict[Node, int]) -> Any:
    return lambda user: order[user] > order[point]


def _used_after(node: Node, point: Node, order: dict[Node, int]) -> bool:
    return any(order[user] > order[point] for user in node.users)


def _aliases(node: Node, without: Node | None = None) -> set[Node]:
    """Every node that may share memory with this one, not counting aliases through ``without``."""
    family, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current in family or current is without:
            continue
        family.add(current)
        if is_view(current) or mutated(current) is not None:
            stack += [a for a in current.all_input_nodes[:1]]
        stack += [u for u in current.users if (is_view(u) and u.all_input_nodes[0] is current) or mutated(u) is current]
    return family


def _constant(node: Any, root: GraphModule) -> torch.Tensor | None:
    while isinstance(node, Node) and node.target in (aten.lift_fresh_copy.default, aten.detach.default):
        node = node.args[0]
    if isinstance(node, Node) and node.op == "get_attr":
        value = getattr(root, str(node.target), None)
        return value if isinstance(value, torch.Tensor) and type(value) is torch.Tensor else None
    return None


def _slice_constant_indices(root: GraphModule) -> None:
    """``x[..., [-2], :]`` with consecutive constant indices becomes a slice, which has rules for packed dimensions."""
    for node in list(root.graph.nodes):
        if node.target is not aten.index.Tensor:
            continue
        indices = node.args[1]
        indexed = [(d, i) for d, i in enumerate(indices) if i is not None]
        value = _constant(indexed[0][1], root) if len(indexed) == 1 else None
        if value is None or value.ndim != 1 or value.dtype == torch.bool or value.numel() == 0:
            continue
        dim, size = indexed[0][0], node.args[0].meta["val"].shape[indexed[0][0]]
        if not isinstance(size, int):
            continue
        picks = [i % size for i in value.tolist()]
        if picks != list(range(picks[0], picks[0] + len(picks))):
            continue
        node.target = aten.slice.Tensor
        node.args = (node.args[0], dim, picks[0], picks[-1] + 1)
