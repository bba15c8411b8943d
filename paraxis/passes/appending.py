"""Caches that grow in place.

A growing cache is extended by concatenation: for every token all keys and values of all layers are copied, into memory
that the system has to provide anew. For small models that takes nearly as long as the products with the weights. Here
the result of such a concatenation has room at its end, and the next one writes there. What was returned before stays
what it was: only memory behind it is written, and only by the first that extends it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..kernels.one_query import attend_last, fits, kernel
from ..sharded import unwrap
from .grouped import argument, is_impure, unrepeated

aten = torch.ops.aten
LEAST = 64
"""Rows of room, at least; beyond that an eighth of the length."""
STEP = 128
"""Rows by which the memory of a cache grows where its layout has to follow from its length."""


def grow_in_place(module: GraphModule, compiled: bool = False) -> int:
    """Let concatenations that extend a cache do so in place; how many. ``compiled``: by an operator that a compiler
    leaves alone."""
    target = torch.ops.paraxis.append_rows.default if compiled else append
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0]
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not _is_kept(node):
            continue
        value, first = node.meta.get("val"), parts[0]
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or not (_is_given(first) or _is_empty(first)):
            continue
        dim = node.args[1] if len(node.args) > 1 else 0
        if not isinstance(dim, int) or dim % 4 != 2:
            continue
        node.target, node.args = target, (*parts, *(() if compiled else (2,)))
        count += 1
    if count:
        module.recompile()
    return count


def attend_where_it_grows(module: GraphModule) -> int:
    """Let attention of one query on caches that an operator extends be one operator with that; how many times."""
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        keys, values = _extended(node.args[1]), _extended(node.args[2])
        if keys is None or values is None or keys is values or not _is_plain(node, keys, values):
            continue
        users = {cache: [user for user in cache.users if _leads_elsewhere(user, node)] for cache in (keys, values)}
        if any(order[user] < order[node] for several in users.values() for user in several):
            continue
        users[node] = list(node.users)
        scale = argument(node, 6, "scale", None)
        query, features = node.args[0], keys.meta["val"].shape[3]
        given = (query, keys.args[0], values.args[0], keys.args[1], values.args[1])
        with graph.inserting_before(node):
            both = graph.call_function(
                torch.ops.paraxis.attend_appended.default, (*given, features**-0.5 if scale is None else float(scale))
            )
            both.meta["val"] = tuple(x.meta["val"] for x in (node, keys, values))
            results = [graph.call_function(operator.getitem, (both, i)) for i in range(3)]
        for old, result in zip((node, keys, values), results, strict=True):
            result.meta = dict(old.meta)
            for user in users[old]:
                user.replace_input_with(old, result)
        graph.erase_node(node)
        count += 1
    if count:
        graph.eliminate_dead_code(is_impure_node=is_impure)
        module.recompile()
    return count


def _extended(node: Any) -> Node | None:
    """The operator that extends the keys or values of an attention; they may be repeated for several queries."""
    repeated = unrepeated(node)
    node = repeated[0] if repeated is not None else node
    return node if isinstance(node, Node) and node.target is torch.ops.paraxis.append_rows.default else None


def _is_plain(node: Node, keys: Node, values: Node) -> bool:
    """Whether the kernel computes this: one query, which sees all rows."""
    if isinstance(argument(node, 3, "attn_mask", None), Node) or argument(node, 4, "dropout_p", 0.0):
        return False
    scale = argument(node, 6, "scale", None)
    if argument(node, 5, "is_causal", False) or not isinstance(scale, (int, float, type(None))):
        return False
    query: Any = node.args[0]
    given: tuple[Any, ...] = (query, keys.args[1], values.args[1])
    found: list[Any] = [x.meta.get("val") if isinstance(x, Node) else None for x in given]
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in found) or found[1].shape != found[2].shape:
        return False
    return fits(found[0], found[1]) and kernel() is not None


def _leads_elsewhere(user: Node, attention: Node) -> bool:
    """Whether somebody else than this attention uses what a node gives."""
    if user is attention:
        return False
    return not user.users or any(_leads_elsewhere(other, attention) for other in user.users)


def _is_kept(node: Node) -> bool:
    """Whether the caller gets it, sharded: a plain tensor may be looked at more closely."""
    return any(getattr(user.target, "__name__", "") == "keep_sharded" for user in node.users)


def _is_given(node: Any) -> bool:
    while isinstance(node, Node) and node.target is unwrap:
        node = node.args[0]
    return isinstance(node, Node) and node.op == "placeholder"


def _is_empty(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and tuple(value.shape) == (0,)


def append(past: torch.Tensor, new: torch.Tensor, dim: int) -> torch.Tensor:
    """``torch.cat([past, new], dim)``, in the memory of ``past`` if there is room behind it that nobody has."""
    if torch.is_grad_enabled() and (past.requires_grad or new.requires_grad):
        return torch.cat([past, new], dim)
    length = past.shape[dim] if past.dim() > 1 else 0
    size = list(new.shape)
    size[dim] += length
    if length:
        memory = past.untyped_storage()
        if getattr(memory, "filled", None) == length and past.storage_offset() == 0:
            room = past.stride(dim - 1) // past.stride(dim) if past.stride(dim) else 0
            if size[dim] <= room:
                result = past.as_strided(size, past.stride())
                result.narrow(dim, length, new.shape[dim]).copy_(new)
                memory.filled = size[dim]  # type: ignore[attr-defined]
                return result
    rows = size[dim] + max(LEAST, size[dim] // 8)
    with torch.inference_mode(False):  # to be written to in any mode
        buffer = torch.empty((*size[:dim], rows, *size[dim + 1 :]), dtype=new.dtype, device=new.device)
    result = buffer.narrow(dim, 0, size[dim])
    if length:
        result.narrow(dim, 0, length).copy_(past)
    result.narrow(dim, length, new.shape[dim]).copy_(new)
    result.untyped_storage().filled = size[dim]  # type: ignore[attr-defined]
    return result


# -- as an operator ------------------------------------------------------------------------------------------------


class _Memory:
    """What tensors of a growing cache lie in. Each is given storage of its own there: results of an operator may not
    share theirs with its arguments."""

    __slots__ = ("bytes", "filled")

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.bytes = torch.empty(count * dtype.itemsize, dtype=torch.uint8).numpy()
        self.filled = 0
        """Rows that somebody has."""

    def tensor(self, like: torch.Tensor, length: int) -> torch.Tensor:
        """A cache of this length at the beginning of it."""
        batch, heads, _, features = like.shape
        storage = torch.from_numpy(self.bytes).untyped_storage()
        storage.memory = self  # type: ignore[attr-defined]
        result = torch.empty(0, dtype=like.dtype)
        result.set_(storage, 0, (batch, heads, length, features), _strides(heads, length, features))
        self.filled = length
        return result


def _append_rows(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """:func:`append` for [batch, heads, rows, features], with room that follows from the length alone.

    A compiler has to know how the result is laid out.
    """
    result, count = _grown(past, new), new.shape[2]
    result.narrow(2, result.shape[2] - count, count).copy_(new)
    return result


def _grown(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``past`` with room for ``new`` behind it, which has yet to be written there."""
    batch, heads, count, features = new.shape
    before = past.shape[2] if past.dim() > 1 else 0
    length = before + count
    memory = getattr(past.untyped_storage(), "memory", None) if before else None
    if memory is not None and memory.filled == before and _rows(before) == _rows(length):
        here = past.storage_offset() == 0 and past.dtype == new.dtype
        if here and past.stride() == _strides(heads, before, features):
            return memory.tensor(new, length)  # type: ignore[no-any-return]
    result = _Memory(batch * heads * _rows(length) * features, new.dtype).tensor(new, length)
    if before:
        result.narrow(2, 0, before).copy_(past)
    return result


def _rows(length: Any) -> Any:
    """Rows that memory is taken for; always more than there are, for strides not to look like those of a full one."""
    return (length // STEP + 1) * STEP


def _strides(heads: int, length: Any, features: int) -> tuple[Any, Any, int, int]:
    rows = _rows(length)
    return heads * rows * features, rows * features, features, 1


def _appended(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What the operator gives, without data."""
    batch, heads, count, features = new.shape
    length = count + (past.shape[2] if past.dim() > 1 else 0)
    return new.new_empty_strided((batch, heads, length, features), _strides(heads, length, features))


def _attend_appended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of one query on keys and values with one more row each, and these."""
    keys, values = _grown(keys, key), _grown(values, value)
    return attend_last(query, keys, values, key, value, scale), keys, values


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define("append_rows(Tensor past, Tensor new) -> Tensor")
_library.impl("append_rows", _append_rows, "CPU")
torch.library.register_fake("paraxis::append_rows", _appended, lib=_library)

_library.define(
    "attend_appended(Tensor query, Tensor keys, Tensor values, Tensor key, Tensor value, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.impl("attend_appended", _attend_appended, "CPU")
torch.library.register_fake(
    "paraxis::attend_appended",
    lambda query, keys, values, key, value, scale: (
        query.new_empty(query.shape),
        _appended(keys, key),
        _appended(values, value),
    ),
    lib=_library,
)
