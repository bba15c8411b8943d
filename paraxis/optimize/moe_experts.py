"""Experts of a MoE layer one after the other on a CPU, so that activations stay in its cache.

A MoE layer sorts its rows by expert, and each operator between its two grouped matmuls runs over the rows of all
experts: megabytes of newly allocated memory, which leave the processor's cache before the next operator reads them.
Here all operators run on the rows of one expert before those of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..compat.torch import OpOverload
from ..graph.match import ANY, AnyOf, Arg, Op, match
from ..graph.nodes import argument, tidied
from ..kernels.cpu.gemv import mm_into
from .patterns import CREATION_OPTIONS

aten = torch.ops.aten

_SLICES = {aten.chunk.default: 2, aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.slice.Tensor: 1}
"""Operators that take slices along a dimension, and the position of that argument."""


def run_experts_in_sequence(module: GraphModule) -> int:
    """Run pairs of grouped matmuls, and the operators between them, expert by expert, in place; how many pairs."""
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
            result = graph.call_function(run_experts, (*found.arguments, inner))
            result.meta = dict(found.last.meta)
        found.last.replace_all_uses_with(result)
        _select_rows(graph, result)
        count += 1
    return tidied(module, count)


def run_experts(
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
        inputs = rows[start:end] if index is None else rows.index_select(0, index[start:end])
        outputs = result[start:end]
        inner = torch.empty((end - start, first.shape[2]), dtype=rows.dtype, device=rows.device)
        mm_into(inputs, first[expert], inner)
        mm_into(between(inner), second[expert], outputs)
        if scale is not None:
            outputs.mul_(scale[start:end])
        start = end
    result[start:].zero_()  # rows of no expert
    return result


def _select_rows(graph: Graph, result: Node) -> None:
    """Restore the order of the rows by ``index_select``, which is much faster than ``index``.

    It takes no negative indices, so it is used for inverse permutations alone.
    """
    for user in list(result.users):
        indices: Any = user.args[1] if user.target is aten.index.Tensor and user.args[0] is result else []
        order = indices[0] if len(indices) == 1 else None
        if match(_INVERSE_PERMUTATION, order) is not None:
            with graph.inserting_before(user):
                selected = graph.call_function(aten.index_select.default, (result, 0, order))
                selected.meta = dict(user.meta)
            user.replace_all_uses_with(selected)


_SORTED_INDICES = Op(getitem, Op(aten.sort.default, ANY, Arg("dim"), Arg("descending")), 1)
_RANGE = AnyOf(
    Op(aten.arange.default, ANY, ignore=CREATION_OPTIONS),
    Op(aten.arange.start_step, 0, ANY, Arg("step", 1, 1), ignore=CREATION_OPTIONS),
)
_INVERSE_PERMUTATION = Op(aten.index_put.default, ANY, [_SORTED_INDICES], _RANGE)
"""``inverse[x.sort().indices] = arange(n)``"""


# -- matching --------------------------------------------------------------------------------------------------------


@dataclass
class _Pair:
    """Two grouped matmuls with operators on single rows in between.

    Attributes:
        last: The node whose result replaces all of them.
        arguments: Those of :func:`run_experts`, but for the last.
        between: What is computed from a row of the first for a row of the second.
    """

    last: Node
    arguments: tuple[Any, ...]
    between: Graph


def _match(second: Node) -> _Pair | None:
    """The pair whose second matmul is this node."""
    if not is_grouped_mm(second):
        return None
    offsets, inner = second.args[2], second.args[0]
    found = _between(inner, offsets) if isinstance(inner, Node) else None
    if found is None:
        return None
    first, between = found
    rows, index = _selected_rows(first.args[0])
    scaled = _scaled(second)
    last, scale = scaled if scaled is not None else (second, None)
    return _Pair(last, (rows, index, first.args[1], second.args[1], offsets, scale), between)


def is_grouped_mm(node: Any) -> bool:
    """Whether a node is the grouped matmul by which transformers runs experts on a CPU."""
    packet = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return isinstance(node, Node) and packet is not None and node.target is packet.default


def _between(result: Node, offsets: Any) -> tuple[Node, Graph] | None:
    """The grouped matmul that a tensor is computed from row by row and from nothing else, and the graph of that."""
    inside: list[Node] = []
    first: Node | None = None
    pending = [result]
    while pending:
        node = pending.pop()
        if node in inside or node is first:
            continue
        if is_grouped_mm(node):
            if first is not None or node.args[2] is not offsets:
                return None
            first = node
            continue
        if not _is_rowwise(node):
            return None
        inside.append(node)
        pending += node.all_input_nodes
    if first is None:
        return None
    known = {*inside, first}
    # What is used elsewhere too would have to exist for all experts at once.
    if any(user not in known for node in known - {result} for user in node.users) or len(result.users) != 1:
        return None
    graph = Graph()
    copied = {first: graph.placeholder("x")}
    for node in sorted(inside):
        copied[node] = graph.node_copy(node, lambda n: copied[n])
    graph.output(copied[result])
    return first, graph


def _is_rowwise(node: Node) -> bool:
    """Whether every row of a result is computed from the same row of the inputs, and from constants."""
    if node.target is getitem:
        return True
    if node.target in _SLICES:
        return argument(node, _SLICES[node.target], "dim", 0) in (1, -1)
    if not isinstance(node.target, OpOverload) or not node.all_input_nodes:
        return False
    shapes = {_shape(each) for each in (*node.all_input_nodes, node)}
    return torch.Tag.pointwise in node.target.tags and len(shapes) == 1 and None not in shapes


def _shape(node: Node) -> tuple[Any, ...] | None:
    """The global shape of a matrix; None if a node is something else."""
    value = node.meta.get("val")
    if node.target is getitem and value is None:
        source: Any = node.args[0]
        value = source.meta["val"][node.args[1]] if "val" in source.meta else None
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return None
    return tuple(n if isinstance(n, int) else str(n) for n in value.shape)  # symbolic sizes cannot be hashed


def _selected_rows(rows: Any) -> tuple[Any, Any]:
    """(matrix, indices) of rows that are selected from a matrix for this use alone; else (the rows, None)."""
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


def _scaled(matmul: Node) -> tuple[Node, Node] | None:
    """The only use of a matmul, if it multiplies every row by a number, and these numbers (routing weights)."""
    user = next(iter(matmul.users)) if len(matmul.users) == 1 else None
    if user is None or user.target is not aten.mul.Tensor or len(user.args) != 2:
        return None
    scale = user.args[1] if user.args[0] is matmul else user.args[0]
    if not isinstance(scale, Node) or scale is matmul:
        return None
    shape, result, rows = _shape(scale), _shape(user), _shape(matmul)
    if shape is None or rows is None or result != rows or shape != (rows[0], 1):
        return None
    same_dtype = scale.meta["val"].dtype == matmul.meta["val"].dtype == user.meta["val"].dtype
    return (user, scale) if same_dtype else None
