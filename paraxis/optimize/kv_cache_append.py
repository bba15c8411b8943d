"""Caches that grow in place.

A growing cache is extended by concatenation: for every token all keys and values of all layers are copied, into memory
that the system has to provide anew. For small models that takes nearly as long as the products with the weights. Here
the result of such a concatenation has room at its end, and the next one writes there. What was returned before stays
what it was: only memory behind it is written, and only by the first that extends it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn.functional import scaled_dot_product_attention

from ..kernels.cpu.build import must_use_aten
from ..kernels.cpu.decode_attention import decode_attention
from ..tensor.graph_io import wrap_shard
from ..tensor.sharded_tensor import unwrap

aten = torch.ops.aten
LEAST = 64
"""Rows of room, at least; beyond that an eighth of the length."""
STEP = 128
"""Rows by which the memory of a cache grows where its layout has to follow from its length."""


def append_kv_cache_in_place(module: GraphModule, compiled: bool = False) -> int:
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
        added = parts[1].meta.get("val") if isinstance(parts[1], Node) else None
        if isinstance(added, torch.Tensor) and added.dtype != value.dtype:  # the cache is of a wider one, and stays so
            continue
        node.target, node.args = target, (*parts, *(() if compiled else (2,)))
        count += 1
    if count:
        module.recompile()
    return count


def _is_kept(node: Node) -> bool:
    """Whether the caller gets it, sharded: a plain tensor may be looked at more closely."""
    return any(user.target is wrap_shard for user in node.users)


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
    result, count = _extended(past, new, dim), new.shape[dim]
    result.narrow(dim, result.shape[dim] - count, count).copy_(new)
    return result


def _extended(past: torch.Tensor, new: torch.Tensor, dim: int) -> torch.Tensor:
    """``past`` with room for ``new`` behind it, which has yet to be written there."""
    length = past.shape[dim] if past.dim() > 1 else 0
    size = list(new.shape)
    size[dim] += length
    if length:
        memory = past.untyped_storage()
        here = getattr(memory, "filled", None) == length and past.storage_offset() == 0
        if here and past.dtype == new.dtype and (past.stride(0) or past.shape[0] == 1):
            room = past.stride(dim - 1) // past.stride(dim) if past.stride(dim) else 0
            if size[dim] <= room:
                memory.filled = size[dim]  # type: ignore[attr-defined]
                return past.as_strided(size, past.stride())
    rows = size[dim] + max(LEAST, size[dim] // 8)
    with torch.inference_mode(False):  # to be written to in any mode
        buffer = torch.empty((*size[:dim], rows, *size[dim + 1 :]), dtype=new.dtype, device=new.device)
    result = buffer.narrow(dim, 0, size[dim])
    if length:
        result.narrow(dim, 0, length).copy_(past)
    result.untyped_storage().filled = size[dim]  # type: ignore[attr-defined]
    return result


def attend_extended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of one query on keys and values with one more row each, and these."""
    if must_use_aten():
        keys, values = append(keys, key, 2), append(values, value, 2)
        shared = query.shape[1] != keys.shape[1]
        return scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=shared), keys, values
    keys, values = _extended(keys, key, 2), _extended(values, value, 2)
    return decode_attention(query, keys, values, key, value, scale), keys, values


# -- as an operator ------------------------------------------------------------------------------------------------


class _Memory:
    """What tensors of a growing cache lie in. Each is given storage of its own there: results of an operator may not
    share theirs with its arguments."""

    __slots__ = ("bytes", "filled")

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.bytes = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device="cpu").numpy()
        self.filled = 0
        """Rows that somebody has."""

    def tensor(self, like: torch.Tensor, length: int) -> torch.Tensor:
        """A cache of this length at the beginning of it."""
        batch, heads, _, features = like.shape
        storage = torch.from_numpy(self.bytes).untyped_storage()
        storage.memory = self  # type: ignore[attr-defined]
        result = like.new_empty(0)
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
    """:func:`attend_extended`, with room that follows from the length alone."""
    keys, values = _grown(keys, key), _grown(values, value)
    return decode_attention(query, keys, values, key, value, scale), keys, values


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
