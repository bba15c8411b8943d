"""Experts one after the other, on a CPU.

A mixture sorts its rows by expert, and each operator between its two grouped products goes through the rows of all
experts: megabytes that leave the processor's cache before the next operator reads them, in memory that is new each
time. Here an expert goes through all of them with its own rows before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..graph.nodes import tidied
from ..kernels.cpu.gemv import mm_into

aten = torch.ops.aten

_BY_COLUMN = {aten.chunk.default: 2, aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.slice.Tensor: 1}
"""Operators that take a part of every row, and where they have their dimension."""


def run_experts_in_sequence(module: GraphModule) -> int:
    """Run what is between two grouped products expert by expert, in place; how many such pairs there were."""
    graph, count = module.graph, 0
    for second in list(graph.nodes):
        found = _match(second)
        if found is None:
            continue
        between = GraphModule({}, found.between)
        name = f"between_experts_{count}"
        module.add_submodule(name, between)
        with graph.inserting_before(found.last):
            inner = graph.get_attr(name)
            result = graph.call_function(in_turn, (*found.arguments, inner))
            result.meta = dict(found.last.meta)
        found.last.replace_all_uses_with(result)
        _select_rows(graph, result)
        count += 1
    return tidied(module, count)


def in_turn(
    rows: torch.Tensor,
    index: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    between: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """``between(rows[index] @ first[e]) @ second[e] * scale`` with the rows of every expert ``e``."""
    count = rows.shape[0] if index is None else index.shape[0]
    result = torch.empty((count, second.shape[2]), dtype=rows.dtype, device=rows.device)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if start == end:
            continue
        taken = rows[start:end] if index is None else rows.index_select(0, index[start:end])
        mine = result[start:end]
        inner = torch.empty((end - start, first.shape[2]), dtype=rows.dtype, device=rows.device)
        mm_into(taken, first[expert], inner)
        mm_into(between(inner), second[expert], mine)
        if scale is not None:
            mine.mul_(scale[start:end])
        start = end
    result[start:].zero_()  # rows of no expert
    return result


def _select_rows(graph: Graph, result: Node) -> None:
    """Take the rows back into their order by the operator that is made for rows; the general one is much slower.

    It takes no negative indices, so it is used for permutations alone.
    """
    for user in list(result.users):
        indices: Any = user.args[1] if user.target is aten.index.Tensor and user.args[0] is result else []
        order = indices[0] if len(indices) == 1 else None
        if _is_inverse(order):
            with graph.inserting_before(user):
                chosen = graph.call_function(aten.index_select.default, (result, 0, order))
                chosen.meta = dict(user.meta)
            user.replace_all_uses_with(chosen)


def _is_inverse(order: Any) -> bool:
    """Whether indices are the inverse of those by which something was sorted: 0, 1, 2, ... put where these say."""
    if not isinstance(order, Node) or order.target is not aten.index_put.default or len(order.args) != 3:
        return False
    indices: Any = order.args[1]
    numbers: Any = order.args[2]
    if not isinstance(numbers, Node) or numbers.target not in (aten.arange.default, aten.arange.start_step):
        return False
    if numbers.target is aten.arange.start_step and (numbers.args[0], *numbers.args[2:]) not in ((0,), (0, 1)):
        return False
    where: Any = indices[0]
    if not isinstance(where, Node) or where.target is not getitem or where.args[1] != 1:
        return False
    source: Any = where.args[0]
    return isinstance(source, Node) and source.target is aten.sort.default


# -- finding them ----------------------------------------------------------------------------------------------------


@dataclass
class _Pair:
    """Two grouped products with operators on single rows in between."""

    last: Node
    arguments: tuple[Any, ...]
    between: Graph


def _match(second: Node) -> _Pair | None:
    if not is_grouped(second):
        return None
    offsets, inner = second.args[2], second.args[0]
    found = _between(inner, offsets) if isinstance(inner, Node) else None
    if found is None:
        return None
    first, between = found
    rows, index = _gathered(first.args[0])
    scaled = _scaled(second)
    last, scale = scaled if scaled is not None else (second, None)
    return _Pair(last, (rows, index, first.args[1], second.args[1], offsets, scale), between)


def is_grouped(node: Any) -> bool:
    packet = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return isinstance(node, Node) and packet is not None and node.target is packet.default


def _between(result: Node, offsets: Any) -> tuple[Node, Graph] | None:
    """The grouped product that a tensor is computed from row by row and from nothing else, and how."""
    inside: list[Node] = []
    first: Node | None = None
    ahead = [result]
    while ahead:
        node = ahead.pop()
        if node in inside or node is first:
            continue
        if is_grouped(node):
            if first is not None or node.args[2] is not offsets:
                return None
            first = node
            continue
        if not _keeps_rows(node):
            return None
        inside.append(node)
        ahead += node.all_input_nodes
    if first is None:
        return None
    known = {*inside, first}
    # used elsewhere, they would have to be there as a whole
    if any(user not in known for node in known - {result} for user in node.users) or len(result.users) != 1:
        return None
    graph = Graph()
    copied = {first: graph.placeholder("x")}
    for node in sorted(inside):
        copied[node] = graph.node_copy(node, lambda n: copied[n])
    graph.output(copied[result])
    return first, graph


def _keeps_rows(node: Node) -> bool:
    """Whether every row of a result is made of the same row of the inputs, and of numbers."""
    if node.target is getitem:
        return True
    if node.target in _BY_COLUMN:
        position = _BY_COLUMN[node.target]
        return (node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)) in (1, -1)
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    shapes = {_shape(each) for each in (*node.all_input_nodes, node)}
    return torch.Tag.pointwise in node.target.tags and len(shapes) == 1 and None not in shapes


def _shape(node: Node) -> tuple[Any, ...] | None:
    """The shape of a matrix, as it is without ranks."""
    value = node.meta.get("val")
    if node.target is getitem and value is None:
        several: Any = node.args[0]
        value = several.meta["val"][node.args[1]] if "val" in several.meta else None
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return None
    return tuple(n if isinstance(n, int) else str(n) for n in value.shape)  # sizes that may change cannot be hashed


def _gathered(rows: Any) -> tuple[Any, Any]:
    """(what, indices) of rows that are taken from a matrix for this one use; else (the rows, None)."""
    if not isinstance(rows, Node) or rows.target is not aten.index.Tensor or len(rows.users) != 1:
        return rows, None
    source, indices = rows.args[0], rows.args[1]
    if not isinstance(source, Node) or _shape(source) is None or len(indices) != 1:  # type: ignore[arg-type]
        return rows, None
    index: Any = indices[0]  # type: ignore[index]
    value = index.meta.get("val") if isinstance(index, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype != torch.int64:
        return rows, None
    return source, index


def _scaled(product: Node) -> tuple[Node, Node] | None:
    """The product of every row with a number, if that is all that is done with a result; and the numbers."""
    user = next(iter(product.users)) if len(product.users) == 1 else None
    if user is None or user.target is not aten.mul.Tensor or len(user.args) != 2:
        return None
    other = user.args[1] if user.args[0] is product else user.args[0]
    if not isinstance(other, Node) or other is product:
        return None
    shape, result, mine = _shape(other), _shape(user), _shape(product)
    if shape is None or mine is None or result != mine or shape != (mine[0], 1):
        return None
    same = other.meta["val"].dtype == product.meta["val"].dtype == user.meta["val"].dtype
    return (user, other) if same else None
