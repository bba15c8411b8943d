"""The kernels for single tokens, put where the operators that they compute stand.

Looks at the local program of a decoding step for linear layers on one row, with the norm before and the gate after
them, and for attention of one query on a cache of a fixed size, with the rotation of query and key and the writes into
the cache. What is not exactly that stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..distributed.operators import all_reduce
from ..graph.nodes import argument, is_impure, shape_of
from .patterns import DTYPES, bare, base_of, both, dtype_of, is_call, turn_of, unrepeated, value_of

aten = torch.ops.aten
WIDEST = 16384
"""Features up to which a program of a kernel holds a whole row."""


def use_decode_kernels(module: GraphModule, examples: Sequence[Any]) -> int:
    """Replace in place what the kernels compute; how many times. ``examples`` are the local inputs."""
    from ..kernels.triton import decode_attention as attend  # noqa: F401 -- registers the operators
    from ..kernels.triton import gemv as row_linear  # noqa: F401 -- registers the operators

    known = dict(zip(module.graph.find_nodes(op="placeholder"), examples, strict=True))
    for node, value in known.items():
        node.meta["val"] = value
    for node in module.graph.nodes:  # a sum over the ranks is like its terms
        if node.target is all_reduce and "val" not in node.meta:
            node.meta["val"] = node.args[0].meta.get("val")
    open_outer_products(module.graph)
    join_increments(module.graph)
    count = _attention(module.graph, known)
    count += _linears(module.graph, known)
    module.graph.eliminate_dead_code(is_impure_node=is_impure)
    module.recompile()
    return count


# -- small steps -----------------------------------------------------------------------------------------------------


def join_increments(graph: Graph) -> None:
    """Count on all counters of the program (each layer's cache has its own) in one go, at its end."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[tuple[Any, torch.dtype], list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        target, by = node.args[0], node.args[1]
        value = value_of(target)
        if node.users or node.kwargs or not isinstance(by, int) or value is None or value.numel() != 1:
            continue
        names = _names(target)
        if names is not None and all(order[user] <= order[node] for name in names for user in name.users):
            found.setdefault((by, value.dtype), []).append(node)
    end = graph.output_node()
    for (by, _), nodes in found.items():
        with graph.inserting_before(end):
            graph.call_function(aten._foreach_add_.Scalar, ([node.args[0] for node in nodes], by))
        for node in nodes:
            graph.erase_node(node)


def open_outer_products(graph: Graph) -> None:
    """A matrix product over a single element is a plain one, which needs no kernel of its own."""
    for target in (aten.matmul.default, aten.bmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            a, b = (value_of(arg) for arg in node.args)
            if a is None or b is None or min(a.dim(), b.dim()) < 2 or a.shape[-1] != 1 or b.shape[-2] != 1:
                continue
            if a.dtype == b.dtype:
                node.target = aten.mul.Tensor


def _names(node: Any) -> list[Node] | None:
    """An input and the conversions of it that give the input itself, which are other names of it."""
    base = node
    while isinstance(base, Node) and base.op == "call_function" and str(base.target).startswith("aten.to."):
        base = base.args[0]
    if not isinstance(base, Node) or base.op != "placeholder":
        return None
    names = [base]
    for name in names:
        names += [u for u in name.users if str(u.target).startswith("aten.to.") and dtype_of(u) == dtype_of(node)]
    return names if node in names else None


# -- attention -------------------------------------------------------------------------------------------------------


class _Write(NamedTuple):
    """A write of one position into a cache: ``cache[:, :, position] = value``."""

    node: Node
    cache: Node
    position: Node
    value: Node


def _attention(graph: Graph, known: dict[Node, Any]) -> int:
    count = 0
    done: list[Node] = []
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        found = _attention_parts(node, known)
        if found is None:
            continue
        query, mask, keys, values = found
        mask = base_of(mask)
        cache = known[keys.cache]
        scale = node.kwargs.get("scale")
        scale = cache.shape[-1] ** -0.5 if scale is None else scale
        turned, turned_key = (turn_of(x, 1, cache.shape[-1]) for x in (query, keys.value))
        with graph.inserting_before(node):
            if turned and turned_key and turned[1:] == turned_key[1:] and _fresh(keys) and _fresh(values):
                args: tuple[Any, ...] = (
                    turned.x,
                    turned_key.x,
                    values.value,
                    base_of(turned.cos),
                    base_of(turned.sin),
                )
                args += (keys.cache, values.cache, keys.position, mask, scale)
                result = graph.call_function(torch.ops.paraxis.rope_decode_attention.default, args)
            else:
                args = (query, keys.node, values.node, mask, scale)
                result = graph.call_function(torch.ops.paraxis.decode_attention.default, args)
        result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        if result.target is torch.ops.paraxis.rope_decode_attention.default:
            done += [keys.node, values.node]
        _simplify_position(graph, keys.position)
        count += 1
    graph.eliminate_dead_code(is_impure_node=is_impure)
    for write in done:
        graph.erase_node(write)
    return count


def _attention_parts(node: Node, known: dict[Node, Any]) -> tuple[Node, Any, _Write, _Write] | None:
    """(query, mask, write of keys, write of values) of an attention of one query that the kernel computes."""
    shape = shape_of(node)
    query, mask = node.args[0], argument(node, 3, "attn_mask", None)
    if shape is None or len(shape) != 4 or not isinstance(shape[2], int) or shape[2] != 1:
        return None
    if argument(node, 4, "dropout_p", 0.0) or argument(node, 5, "is_causal", False):
        return None
    writes = []
    for states in node.args[1:3]:
        repeated = unrepeated(states)
        write = _written(repeated[0] if repeated else states)
        cache = known.get(write.cache) if write else None
        if write is None or not isinstance(cache, torch.Tensor) or cache.dim() != 4 or cache.stride(3) != 1:
            return None
        features = cache.shape[-1]
        if (
            cache.dtype not in DTYPES
            or dtype_of(query) != cache.dtype
            or not all(isinstance(n, int) for n in cache.shape)
        ):
            return None
        if features & (features - 1) or not 16 <= features <= 256:
            return None
        writes.append(write)
    keys, values = writes
    cache = known[keys.cache]
    if not isinstance(query, Node) or known[values.cache].shape != cache.shape or keys.position is not values.position:
        return None
    if mask is not None:
        seen = value_of(mask)
        if seen is None or seen.dim() != 4 or tuple(seen.shape[1:]) != (1, 1, cache.shape[2]):
            return None
        if seen.shape[0] not in (1, cache.shape[0]) or seen.dtype not in (torch.bool, *DTYPES):
            return None
    return query, mask, keys, values


def _written(node: Any) -> _Write | None:
    """The write whose result a node is."""
    if is_call(node, aten.index_put_.default) and not (len(node.args) > 3 and node.args[3]) and not node.kwargs:
        cache, index, value = node.args[:3]
        if len(index) != 3 or index[0] is not None or index[1] is not None:
            return None
        position = index[2]
    elif is_call(node, aten.index_copy_.default) and node.args[1] == 2:
        cache, _, position, value = node.args
    else:
        return None
    at = value_of(position)
    if not isinstance(cache, Node) or cache.op != "placeholder" or not isinstance(value, Node) or at is None:
        return None
    return _Write(node, cache, position, value) if at.numel() == 1 and at.dtype == torch.int64 else None


def _fresh(write: _Write) -> bool:
    """Whether nobody else looks at the cache: it may be written later, by the kernel that reads it."""
    return list(write.cache.users) == [write.node]


def _simplify_position(graph: Graph, node: Node) -> None:
    """``arange(1) + x`` is ``x``: one kernel less for every layer that keeps its own count."""
    for counted, x in both(node, aten.add.Tensor):
        value = value_of(x)
        if not is_call(counted, aten.arange.start_step, aten.arange.default, aten.arange.start) or value is None:
            continue
        if value.dtype != torch.int64 or value.numel() != 1 or _is_counted_on(x):
            continue
        if counted.args in ((0, 1), (1,), (0, 1, 1)):
            with graph.inserting_before(node):
                same = graph.call_function(aten.reshape.default, (x, [1]))
            same.meta["val"] = node.meta.get("val")
            node.replace_all_uses_with(same)
            return


def _is_counted_on(node: Any) -> bool:
    """Whether a number changes before the end of the program: another name for it would change with it."""
    names = _names(node) or [node]
    return any(u.is_impure() and u.target is not aten._foreach_add_.Scalar for name in names for u in name.users)


# -- linear layers ---------------------------------------------------------------------------------------------------


class _Norm(NamedTuple):
    """``weight * (x * rsqrt(mean(x ** 2) + eps))``, with ``x`` in float32 inside."""

    x: Node
    weight: Node
    eps: float


def _linears(graph: Graph, known: dict[Node, Any]) -> int:
    of: dict[Node, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        if _row_of(node, known):
            of.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
    count = 0
    for nodes in of.values():
        biased = [n for n in nodes if len(n.args) > 2 and n.args[2] is not None]
        for alike in (biased, [n for n in nodes if n not in biased]):
            for start in range(0, len(alike), 3):
                _emit_linears(graph, alike[start : start + 3], known)
                count += 1
    return count


def _row_of(node: Node, known: dict[Node, Any]) -> bool:
    """Whether a linear layer is one on a single row, with a weight that is an input of the program."""
    x, others = node.args[0], node.args[1:]
    row, weight = value_of(x), known.get(others[0])  # type: ignore[arg-type]
    if row is None or not isinstance(weight, torch.Tensor) or not all(isinstance(n, int) for n in row.shape):
        return False
    if prod(row.shape[:-1]) != 1 or row.dtype not in DTYPES or node.kwargs:
        return False
    given = [known.get(o) for o in others if o is not None]  # type: ignore[arg-type]
    if any(not isinstance(o, torch.Tensor) or o.dtype != row.dtype or not o.is_contiguous() for o in given):
        return False
    return weight.dim() == 2 and weight.shape[1] % 16 == 0 and weight.shape[1] <= WIDEST and weight.shape[0] > 0


def _emit_linears(graph: Graph, nodes: list[Node], known: dict[Node, Any]) -> None:
    x: Any = nodes[0].args[0]
    norm = _norm(_whole_of(x), known, known[nodes[0].args[1]].shape[1])  # type: ignore[index]
    parts = _summands(norm.x) if norm else None
    gate = _gate(nodes)
    if gate is not None:
        nodes = list(gate[:2])
    weights: list[Any] = [node.args[1] for node in nodes]
    biases = [node.args[2] for node in nodes if len(node.args) > 2 and node.args[2] is not None]
    with graph.inserting_before(norm.x.next if norm and parts else min(nodes)):
        total = None
        if norm:
            a, b = parts or (norm.x, None)
            args: tuple[Any, ...] = (a, b, norm.weight, norm.eps, weights, biases, gate is not None)
            both = graph.call_function(torch.ops.paraxis.rmsnorm_gemv.default, args)
            result = graph.call_function(operator.getitem, (both, 0))
            total = graph.call_function(operator.getitem, (both, 1)) if parts else None
        else:
            args = (x, weights, biases, gate is not None)
            result = graph.call_function(torch.ops.paraxis.gemv.default, args)
        pieces, start = [], 0
        for weight in weights if gate is None and len(weights) > 1 else ():
            end = start + known[weight].shape[0]
            pieces.append(graph.call_function(aten.slice.Tensor, (result, -1, start, end)))
            start = end
    if norm and total is not None:
        total.meta["val"] = norm.x.meta.get("val")
        norm.x.replace_all_uses_with(total)
    for node, piece in zip(nodes if gate is None else gate[2:], pieces or [result], strict=True):
        piece.meta["val"] = node.meta.get("val")
        node.replace_all_uses_with(piece)


def _whole_of(node: Node) -> Node:
    """What a slice takes all of."""
    if is_call(node, aten.slice.Tensor):
        value, whole = value_of(node), value_of(node.args[0])
        if value is not None and whole is not None and value.shape == whole.shape:
            return node.args[0]  # type: ignore[return-value]
    return node


def _norm(node: Any, known: dict[Node, Any], features: int) -> _Norm | None:
    for weight, scaled in both(node, aten.mul.Tensor):
        held = known.get(weight)
        if not isinstance(held, torch.Tensor) or tuple(held.shape) != (features,):
            continue
        for value, root in both(bare(scaled), aten.mul.Tensor):
            x = bare(value)
            eps = _root_mean_square(root, x)
            right = dtype_of(scaled) == held.dtype == dtype_of(x) and dtype_of(value) == torch.float32
            if eps is not None and right and held.is_contiguous():
                return _Norm(x, weight, eps)
    return None


def _root_mean_square(node: Any, x: Node) -> float | None:
    """The ``eps`` of ``rsqrt(mean(x ** 2, -1) + eps)`` in float32."""
    if not is_call(node, aten.rsqrt.default) or dtype_of(node) != torch.float32:
        return None
    for mean, eps in both(node.args[0], aten.add.Tensor):
        if not isinstance(eps, (int, float)) or not is_call(mean, aten.mean.dim) or mean.kwargs:
            continue
        if len(mean.args) != 3 or mean.args[1] not in ([-1], (-1,)) or mean.args[2] is not True:
            continue
        square = mean.args[0]
        if is_call(square, aten.pow.Tensor_Scalar) and square.args[1] == 2 and bare(square.args[0]) is x:
            return float(eps)
    return None


def _summands(node: Node) -> tuple[Node, Node] | None:
    """The two rows that a row is the sum of."""
    if not is_call(node, aten.add.Tensor) or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        return None
    values = [value_of(a) for a in (*node.args, node)]
    if any(v is None or v.shape != values[2].shape or v.dtype != values[2].dtype for v in values):  # type: ignore[union-attr]
        return None
    return node.args[0], node.args[1]  # type: ignore[return-value]


def _gate(nodes: list[Node]) -> tuple[Node, Node, Node] | None:
    """(first, second, product) of ``silu(first) * second`` where nothing else looks at the two."""
    if len(nodes) != 2 or any(len(node.users) != 1 for node in nodes):
        return None
    for first, second in (nodes, nodes[::-1]):
        silu, product = next(iter(first.users)), next(iter(second.users))
        if not is_call(silu, aten.silu.default) or len(silu.users) != 1 or not is_call(product, aten.mul.Tensor):
            continue
        if set(product.args) == {silu, second}:
            return first, second, product
    return None
