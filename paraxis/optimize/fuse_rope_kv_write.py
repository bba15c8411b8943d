"""One kernel for what a layer does with query, key and value of a prompt on an empty cache of a fixed size.

The cache makes zeros and writes the turned keys and the values into them; the query is turned beside that. What is not
exactly that stays as it is. See ``kernels/place.py``.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..distributed.operators import take_shard
from ..graph.mutation import is_view
from ..graph.nodes import argument, is_impure, tidied
from ..kernels.triton import rope_kv_write as place  # noqa: F401 -- registers the operator
from .patterns import DTYPES, base_of, both, is_call, turn_of, unrepeated, value_of

aten = torch.ops.aten


def fuse_rope_kv_write(module: GraphModule) -> int:
    """Replace in place what the kernel does; how many times."""
    graph: Graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = _writes(graph)
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        found = _parts(node, order, writes)
        if found is None:
            continue
        replaced, args = found
        given = [arg for arg in args if isinstance(arg, Node)]
        last = max(given, key=order.__getitem__)
        if any(order[user] <= order[last] for old in replaced for user in old.users):
            continue
        if any(_home(arg) in writes for arg in given):  # they may change before they were read
            continue
        with graph.inserting_after(last):
            results = graph.call_function(torch.ops.paraxis.rope_kv_write.default, args)
        order[results] = order[last]
        for i, old in reversed(list(enumerate(replaced))):
            with graph.inserting_after(results):
                result = graph.call_function(operator.getitem, (results, i))
            result.meta = dict(old.meta)
            order[result] = order[last]
            old.replace_all_uses_with(result)
        count += 1
    return tidied(module, count)


def merge_cache_counters(module: GraphModule) -> int:
    """Count on copies of counters (each layer's cache has its own) in one go; how many counters."""
    graph: Graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = _writes(graph)
    found: dict[tuple[Any, Any], list[tuple[Node, Node, Node]]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        copy, by = node.args[0], node.args[1]
        counter, value = _original(copy), value_of(copy)
        if counter is None or counter in writes or value is None or not isinstance(by, int) or node.kwargs:
            continue
        if writes[copy] == [node] and not any(is_view(user) for user in copy.users):
            found.setdefault((by, value.dtype), []).append((node, copy, counter))
    for (by, _), pairs in found.items():
        first = min((node for node, *_ in pairs), key=order.__getitem__)
        with graph.inserting_before(first):
            sums = graph.call_function(aten._foreach_add.Scalar, ([counter for *_, counter in pairs], by))
            items = [graph.call_function(operator.getitem, (sums, i)) for i in range(len(pairs))]
        for (node, copy, counter), item in zip(pairs, items, strict=True):
            item.meta = dict(copy.meta)
            for user in set(copy.users) - {node}:
                user.replace_input_with(copy, counter if order[user] < order[node] else item)
            node.replace_all_uses_with(item)
            graph.erase_node(node)
    return tidied(module, sum(map(len, found.values())))


def _original(node: Any) -> Node | None:
    """The input that a node is a copy of."""
    source = node.args[0] if is_call(node, aten.clone.default) else None
    return source if isinstance(source, Node) and source.op == "placeholder" else None


def _home(node: Node) -> Node:
    """The tensor whose memory a node is, or may be, another name of."""
    while is_view(node) or (node.op == "call_function" and is_impure(node)):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            break
        node = source
    return node


def _writes(graph: Graph) -> dict[Node, list[Node]]:
    """The tensors that are written to, and by which nodes."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or not is_impure(node):
            continue
        schema = getattr(node.target, "_schema", None)
        targets = node.all_input_nodes
        if schema is not None and not node.kwargs:
            pairs = zip(schema.arguments, node.args, strict=False)
            changed = [arg for given, arg in pairs if given.alias_info is not None and given.alias_info.is_write]
            targets = [x for arg in changed for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        for target in targets:
            if isinstance(target, Node):
                found.setdefault(_home(target), []).append(node)
    return found


class _Write(NamedTuple):
    """Rows put into zeros from a place on that an input says."""

    node: Node
    start: Node
    rows: Node


def _parts(
    node: Node, order: dict[Node, int], writes: dict[Node, list[Node]]
) -> tuple[tuple[Node, Node, Node], tuple[Any, ...]] | None:
    """(query, keys, values) of an attention as the kernel gives them, and what it takes."""
    query: Any = node.args[0]
    keys, values = (_written(states, order, writes) for states in node.args[1:3])
    shown = value_of(query)
    if keys is None or values is None or keys.start is not values.start or shown is None or shown.dim() != 4:
        return None
    cache, other, rows = value_of(keys.node), value_of(values.node), value_of(values.rows)
    if cache is None or other is None or rows is None:
        return None
    if not all(isinstance(n, int) for n in (*shown.shape, *cache.shape)):
        return None
    if not (shown.dtype == cache.dtype == other.dtype == rows.dtype and cache.dtype in DTYPES):
        return None
    batch, heads, length, features = cache.shape
    count = shown.shape[2]
    if count == 1 or count > length or shown.shape[0] != batch or shown.shape[3] != features:
        return None
    if other.shape != cache.shape or rows.shape != (batch, heads, count, features):
        return None
    if features & (features - 1) or not 16 <= features <= 256:
        return None
    turned, turned_key = turn_of(query, count, features), turn_of(keys.rows, count, features)
    if turned is None or turned_key is None or turned[1:] != turned_key[1:]:
        return None
    if _shape(turned.x) != tuple(shown.shape) or _shape(turned_key.x) != tuple(rows.shape):
        return None
    factors = [base_of(by) for by in turned[1:]]
    if _shape(factors[0]) != _shape(factors[1]) or _shape(factors[0])[1:] != (count, features):
        return None
    args = (turned.x, turned_key.x, values.rows, *factors, keys.start, length)
    return (query, keys.node, values.node), args


def _shape(node: Any) -> tuple[Any, ...]:
    value = value_of(node)
    return () if value is None else tuple(value.shape)


def _written(node: Any, order: dict[Node, int], writes: dict[Node, list[Node]]) -> _Write | None:
    """The write whose result, or first rows, attention sees."""
    if is_call(node, aten.slice.Tensor) and argument(node, 1, "dim", 0) == 2 and argument(node, 2, "start", None) == 0:
        node = node.args[0]
    repeated = unrepeated(node)
    node = repeated[0] if repeated else node
    if not is_call(node, aten.index_put.default) or len(node.args) != 3 or node.kwargs or not _is_zero(node.args[0]):
        return None
    _, index, rows = node.args
    if len(index) != 3 or index[0] is not None or index[1] is not None or not isinstance(rows, Node):
        return None
    written = value_of(rows)
    for counted, start in both(index[2], aten.add.Tensor):
        first, value = _original(start) or start, value_of(start)
        if written is None or written.dim() != 4 or value is None or value.dtype != torch.int64 or value.numel() != 1:
            continue
        if first.op != "placeholder" or not is_call(counted, *_RANGES):
            continue
        if any(order[change] < order[index[2]] for change in writes.get(start, ())):
            continue
        if counted.args in ((0, written.shape[2]), (0, written.shape[2], 1), (written.shape[2],)):
            return _Write(node, first, rows)
    return None


_RANGES = (aten.arange.start_step, aten.arange.start, aten.arange.default)


def _is_zero(node: Any) -> bool:
    """Whether a tensor, or the one that it is the rank's part of, is zeros that nobody else sees, or writes to."""
    if is_call(node, take_shard) and len(node.users) == 1:
        node = node.args[0]
    if not isinstance(node, Node) or len(node.users) != 1:
        return False
    if is_call(node, aten.full.default):
        return isinstance(node.args[1], (int, float)) and node.args[1] == 0
    return is_call(node, aten.zeros.default)
