"""RoPE and KV cache writes of a prefill as one kernel per layer.

In a prefill on an empty preallocated cache, a layer creates zeros and writes the rotated keys and the values into them;
the query is rotated beside that. One kernel does all of it (:mod:`paraxis.kernels.triton.rope_kv_write`). What does not
match exactly stays.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..compat.torch import schema_or_none
from ..distributed.operators import take_shard
from ..graph.match import ANY, NODE, AnyOf, Arg, Capture, Op, Via, Where, matches
from ..graph.mutation import is_view
from ..graph.nodes import is_impure, tidied
from ..kernels.triton import rope_kv_write  # noqa: F401 -- registers the operator
from .patterns import (
    CREATION_OPTIONS,
    KERNEL_DTYPES,
    Rotary,
    is_call,
    is_input,
    is_kernel_head_size,
    is_position,
    is_static,
    range_of,
    rotary_of,
    tensor_of,
    without_added_dims,
    without_repeated_heads,
)

aten = torch.ops.aten
Order = dict[Node, int]
"""The position of every node in the program."""
Writes = dict[Node, list[Node]]
"""The nodes that write to a tensor, by the node that owns its memory."""


def fuse_rope_kv_write(module: GraphModule) -> int:
    """Replace in place what the kernel computes; how many times."""
    graph: Graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = _writes_of(graph)
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        prefill = _prefill_of(node, order, writes)
        if prefill is None or not _can_move(prefill, order, writes):
            continue
        last = max(prefill.inputs, key=order.__getitem__)
        with graph.inserting_after(last):
            results = graph.call_function(torch.ops.paraxis.rope_kv_write.default, (*prefill.inputs, prefill.length))
        order[results] = order[last]
        for i, old in reversed(list(enumerate(prefill.replaced))):
            with graph.inserting_after(results):
                result = graph.call_function(operator.getitem, (results, i))
            result.meta = dict(old.meta)
            order[result] = order[last]
            old.replace_all_uses_with(result)
        count += 1
    return tidied(module, count)


def merge_cache_counters(module: GraphModule) -> int:
    """Increment copies of counters (each layer's KV cache has one) by one operator; how many counters."""
    graph: Graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = _writes_of(graph)
    merged: dict[tuple[int, torch.dtype], list[_Increment]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        copy, step = node.args[0], node.args[1]
        counter, value = _copied_input(copy), tensor_of(copy)
        if counter is None or counter in writes or value is None or not isinstance(step, int) or node.kwargs:
            continue
        if writes[copy] == [node] and not any(is_view(user) for user in copy.users):
            merged.setdefault((step, value.dtype), []).append(_Increment(node, copy, counter))
    for (step, _), increments in merged.items():
        first = min((increment.node for increment in increments), key=order.__getitem__)
        with graph.inserting_before(first):
            sums = graph.call_function(aten._foreach_add.Scalar, ([each.counter for each in increments], step))
            results = [graph.call_function(operator.getitem, (sums, i)) for i in range(len(increments))]
        for (node, copy, counter), result in zip(increments, results, strict=True):
            result.meta = dict(copy.meta)
            for user in set(copy.users) - {node}:
                user.replace_input_with(copy, counter if order[user] < order[node] else result)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
    return tidied(module, sum(map(len, merged.values())))


class _Increment(NamedTuple):
    """``copy.add_(step)`` of a copy of a counter that is an input."""

    node: Node
    copy: Node
    counter: Node


def _copied_input(node: Any) -> Node | None:
    """The input that a node is a copy of."""
    source = node.args[0] if is_call(node, aten.clone.default) else None
    return source if is_input(source) else None


# -- memory ----------------------------------------------------------------------------------------------------------


def _owner_of(node: Node) -> Node:
    """The node that owns the memory of a tensor, which may be a view of it or the result of a write into it."""
    while is_view(node) or (node.op == "call_function" and is_impure(node)):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            break
        node = source
    return node


def _writes_of(graph: Graph) -> Writes:
    """All writes of the program."""
    found: Writes = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or not is_impure(node):
            continue
        for target in _write_targets(node):
            if isinstance(target, Node):
                found.setdefault(_owner_of(target), []).append(node)
    return found


def _write_targets(node: Node) -> list[Any]:
    """The arguments that a node writes to: all of them, unless the schema of the operator says which."""
    schema = schema_or_none(node.target)
    if schema is None or node.kwargs:
        return list(node.all_input_nodes)
    pairs = zip(schema.arguments, node.args, strict=False)
    written = [arg for formal, arg in pairs if formal.alias_info is not None and formal.alias_info.is_write]
    return [target for arg in written for target in (arg if isinstance(arg, (list, tuple)) else [arg])]


# -- matching --------------------------------------------------------------------------------------------------------

_ZEROS = AnyOf(
    Op(aten.zeros.default, ANY, users=1, ignore=CREATION_OPTIONS),
    Op(
        aten.full.default,
        ANY,
        Where(lambda value: isinstance(value, (int, float)) and value == 0),
        users=1,
        ignore=CREATION_OPTIONS,
    ),
)
_EMPTY_CACHE = AnyOf(_ZEROS, Op(take_shard, _ZEROS, ANY, ANY, ANY, users=1))
"""Zeros, or a rank's shard of them, that nothing else reads or writes."""

_WRITE = Op(
    aten.index_put.default,
    _EMPTY_CACHE,
    [
        None,
        None,
        Capture(
            "positions",
            Op(aten.add.Tensor, range_of(Capture("count")), Capture("start", Where(is_position)), commutes=True),
        ),
    ],
    Capture("rows", NODE),
)
"""``cache[:, :, arange(count) + start] = rows``"""

_WRITTEN_STATES = Via(without_repeated_heads, Capture("node", _WRITE))
_STATES = AnyOf(
    Op(aten.slice.Tensor, _WRITTEN_STATES, Arg("dim", 2, 0), Arg("start", 0), Arg("end"), Arg("step", default=1)),
    _WRITTEN_STATES,
)
"""What attention reads as keys or values: the cache or the first rows of it, perhaps with repeated heads."""


class _KVWrite(NamedTuple):
    """A write of rows into an empty cache, from a position on that is an input."""

    node: Node
    start: Node
    rows: Node


class _Prefill(NamedTuple):
    """What the kernel computes for a layer.

    Attributes:
        replaced: The rotated query, and the caches of keys and values.
        inputs: Query and key before RoPE, value, cosines, sines, and the position of the first row.
        length: The length of the caches.
    """

    replaced: tuple[Node, Node, Node]
    inputs: tuple[Node, ...]
    length: int


def _prefill_of(node: Node, order: Order, writes: Writes) -> _Prefill | None:
    """What the kernel computes of the inputs of an attention; None if it does not compute them."""
    query, keys, values = node.args[0], *(_kv_write_of(states, order, writes) for states in node.args[1:3])
    if keys is None or values is None or keys.start is not values.start or not isinstance(query, Node):
        return None
    rows = _kernel_rows(query, keys, values)
    if rows is None:
        return None
    features = rows.shape[3]
    rotaries = [rotary_of(states, rows.shape[2], features) for states in (query, keys.rows)]
    rotary, key_rotary = rotaries
    if rotary is None or key_rotary is None or not rotary.has_angles_of(key_rotary):
        return None
    if _shape(rotary.x) != _shape(query) or _shape(key_rotary.x) != tuple(rows.shape):
        return None
    angles = _kernel_angles(rotary, rows)
    if angles is None:
        return None
    inputs = (rotary.x, key_rotary.x, values.rows, *angles, keys.start)
    return _Prefill((query, keys.node, values.node), inputs, _shape(keys.node)[2])


def _kernel_rows(query: Node, keys: _KVWrite, values: _KVWrite) -> torch.Tensor | None:
    """The rows of values that are written, if the kernel takes the shapes and dtypes of a layer."""
    tensors = [tensor_of(node) for node in (query, keys.node, values.node, values.rows)]
    if any(tensor is None for tensor in tensors):
        return None
    states, cache, value_cache, rows = tensors  # type: Any, Any, Any, Any
    if states.dim() != 4 or cache.dim() != 4 or not is_static(states, cache):
        return None
    if not states.dtype == cache.dtype == value_cache.dtype == rows.dtype or cache.dtype not in KERNEL_DTYPES:
        return None
    batch, heads, length, features = cache.shape
    count = states.shape[2]
    if count == 1 or count > length or states.shape[0] != batch or states.shape[3] != features:
        return None
    if value_cache.shape != cache.shape or rows.shape != (batch, heads, count, features):
        return None
    return rows if is_kernel_head_size(features) else None


def _kernel_angles(rotary: Rotary, rows: torch.Tensor) -> tuple[Node, Node] | None:
    """Cosines and sines as [batch or 1, rows, features], if they have the same shape."""
    cos, sin = without_added_dims(rotary.cos), without_added_dims(rotary.sin)
    if _shape(cos) != _shape(sin) or _shape(cos)[1:] != tuple(rows.shape[2:]):
        return None
    return cos, sin


def _shape(node: Any) -> tuple[Any, ...]:
    value = tensor_of(node)
    return () if value is None else tuple(value.shape)


def _kv_write_of(states: Any, order: Order, writes: Writes) -> _KVWrite | None:
    """The write whose result, or first rows, attention reads as keys or values."""
    for found in matches(_STATES, states):
        rows, start, positions = tensor_of(found["rows"]), found["start"], found["positions"]
        source = _copied_input(start) or start
        if rows is None or rows.dim() != 4 or not is_input(source):
            continue
        if any(order[write] < order[positions] for write in writes.get(start, ())):
            continue
        if found["count"] == rows.shape[2]:
            return _KVWrite(found["node"], source, found["rows"])
    return None


def _can_move(prefill: _Prefill, order: Order, writes: Writes) -> bool:
    """Whether the kernel can run right after its last input: before all uses of its results, on unchanged memory."""
    last = max(order[node] for node in prefill.inputs)
    if any(order[user] <= last for node in prefill.replaced for user in node.users):
        return False
    return not any(_owner_of(node) in writes for node in prefill.inputs)
