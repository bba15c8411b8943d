"""KV cache append in place, instead of a concatenation.

A ``DynamicCache`` appends by concatenation: for every token it copies the keys and values of all layers into newly
allocated memory. For small models that takes nearly as long as the matmuls with the weights. Here the result of such a
concatenation is a view of a buffer with free rows behind it, and the next append writes there. Tensors that were
returned before do not change: only rows behind them are written, and only by the first append to each. Whoever appends
to the same tensor once more (beam search, a cropped cache) gets a buffer of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..compat.torch import must_use_aten, scaled_dot_product_attention
from ..graph.nodes import tidied
from ..kernels.cpu.decode_attention import decode_attention
from ..tensor.graph_io import wrap_shard
from ..tensor.sharded_tensor import unwrap

aten = torch.ops.aten
MIN_FREE_ROWS = 64
"""Free rows of a new buffer, at least; beyond that an eighth of the length."""
ROWS_STEP = 128
"""Rows by which a buffer grows where a compiler has to know the strides from the length."""


def append_kv_cache_in_place(module: GraphModule, compiled: bool = False) -> int:
    """Replace the concatenations that append to a KV cache; how many. ``compiled``: by an operator that Inductor does
    not look into."""
    target = torch.ops.paraxis.append_rows.default if compiled else append
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0]
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not _is_returned_sharded(node):
            continue
        value, first = node.meta.get("val"), parts[0]
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or not (_is_input(first) or _is_empty(first)):
            continue
        dim = node.args[1] if len(node.args) > 1 else 0
        if not isinstance(dim, int) or dim % 4 != 2:
            continue
        added = parts[1].meta.get("val") if isinstance(parts[1], Node) else None
        if (
            isinstance(added, torch.Tensor) and added.dtype != value.dtype
        ):  # concatenation promotes to the cache's dtype
            continue
        past = first if compiled or not _is_empty(first) else None
        node.target, node.args = target, (past, parts[1], *(() if compiled else (2,)))
        count += 1
    return tidied(module, count)


def drop_empty_parts(module: GraphModule, compiled: bool = False) -> int:
    """Concatenate without the empty tensor that a new KV cache begins with; how often. The result is a copy still.

    ``compiled``: for Inductor, which would return the copy with the strides of keys and values, that is, of views of
    linear layers. A later concatenation is contiguous, and the program of the first decode step would be for it alone.
    """
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0]
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not _is_empty(parts[0]):
            continue
        values = [part.meta.get("val") if isinstance(part, Node) else None for part in (*parts, node)]
        if all(isinstance(x, torch.Tensor) for x in values) and len({x.dtype for x in values}) == 1:  # type: ignore[union-attr]
            node.args = ([parts[1]], *node.args[1:])
            if compiled:
                node.target, node.args = aten.clone.default, (parts[1],)
                node.kwargs = {"memory_format": torch.contiguous_format}
            count += 1
    return tidied(module, count)


def _is_returned_sharded(node: Node) -> bool:
    """Whether it leaves the program as a sharded tensor. Users may do anything with a plain tensor."""
    return any(user.target is wrap_shard for user in node.users)


def _is_input(node: Any) -> bool:
    while isinstance(node, Node) and node.target is unwrap:
        node = node.args[0]
    return isinstance(node, Node) and node.op == "placeholder"


def _is_empty(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        return False
    size = value.shape[0]
    return isinstance(size, int) and size == 0  # a symbolic size may be a value, which nothing can be asked of


# -- buffers -------------------------------------------------------------------------------------------------------


def _owns_free_rows(past: torch.Tensor, length: int, dtype: torch.dtype) -> bool:
    """Whether the rows behind ``past`` are free: it is at the start of a buffer in which no longer tensor exists."""
    used = getattr(past.untyped_storage(), "rows_in_use", None)
    return used == length and past.storage_offset() == 0 and past.dtype == dtype


def _use_rows(result: torch.Tensor, length: int) -> torch.Tensor:
    """Note on the storage of a result that its rows are in use; Python attributes of a storage live as long as it."""
    result.untyped_storage().rows_in_use = length  # type: ignore[attr-defined]
    return result


def _new_buffer(past: torch.Tensor | None, new: torch.Tensor, size: list[int], dim: int, rows: int) -> torch.Tensor:
    """A view of this size at the start of a new buffer, with the rows of ``past`` copied."""
    with torch.inference_mode(False):  # a buffer that can be written to in any mode
        buffer = torch.empty((*size[:dim], rows, *size[dim + 1 :]), dtype=new.dtype, device=new.device)
    result = buffer.narrow(dim, 0, size[dim])
    length = size[dim] - new.shape[dim]
    if past is not None and length:
        result.narrow(dim, 0, length).copy_(past)
    return result


# -- as a function -------------------------------------------------------------------------------------------------


def append(past: torch.Tensor | None, new: torch.Tensor, dim: int) -> torch.Tensor:
    """``torch.cat([past, new], dim)``, in the buffer of ``past`` if the rows behind it are free; a new buffer with
    ``new`` if there is nothing to append to."""
    if torch.is_grad_enabled() and (new.requires_grad or (past is not None and past.requires_grad)):
        return torch.cat([new] if past is None else [past, new], dim)
    result, count = _extended(past, new, dim), new.shape[dim]
    result.narrow(dim, result.shape[dim] - count, count).copy_(new)
    return result


def _extended(past: torch.Tensor | None, new: torch.Tensor, dim: int) -> torch.Tensor:
    """``past`` with rows for ``new`` behind it, which are not written yet."""
    length = past.shape[dim] if past is not None and past.dim() > 1 else 0
    size = list(new.shape)
    size[dim] += length
    if (
        past is not None
        and length
        and _owns_free_rows(past, length, new.dtype)
        and (past.stride(0) or past.shape[0] == 1)
    ):
        capacity = past.stride(dim - 1) // past.stride(dim) if past.stride(dim) else 0
        if size[dim] <= capacity:
            return _use_rows(past.as_strided(size, past.stride()), size[dim])
    rows = size[dim] + max(MIN_FREE_ROWS, size[dim] // 8)
    return _use_rows(_new_buffer(past, new, size, dim, rows), size[dim])


def attend_extended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append one row to keys and values, and attend to all rows: the attention, the keys and the values."""
    if must_use_aten():
        keys, values = append(keys, key, 2), append(values, value, 2)
        shared = query.shape[1] != keys.shape[1]
        return scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=shared), keys, values
    keys, values = _extended(keys, key, 2), _extended(values, value, 2)
    return decode_attention(query, keys, values, key, value, scale), keys, values


# -- as an operator ------------------------------------------------------------------------------------------------
# The result may be a view of ``past``, which a schema cannot say: an alias is there always or never. Declared as a new
# tensor it is right for a compiler: what it may read of ``past`` never changes, and both are inputs or results of the
# graph, whose memory is not reused.


def _append_rows(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """:func:`append` for [batch, heads, rows, features], with strides that follow from the length alone.

    A compiler has to know the strides of the result.
    """
    result, count = _grown(past, new), new.shape[2]
    result.narrow(2, result.shape[2] - count, count).copy_(new)
    return result


def _grown(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``past`` with rows for ``new`` behind it, which are not written yet."""
    batch, heads, count, features = new.shape
    before = past.shape[2] if past.dim() > 1 else 0
    size = [batch, heads, before + count, features]
    if before and _rows(before) == _rows(size[2]) and _owns_free_rows(past, before, new.dtype):
        strides = _strides(heads, before, features)
        if past.stride() == strides:
            return _use_rows(past.as_strided(size, strides), size[2])
    return _use_rows(_new_buffer(past, new, size, 2, _rows(size[2])), size[2])


def _rows(length: Any) -> Any:
    """Rows of the buffer for a length; always more than that, for strides not to look like those of a full one."""
    return (length // ROWS_STEP + 1) * ROWS_STEP


def _strides(heads: int, length: Any, features: int) -> tuple[Any, Any, int, int]:
    rows = _rows(length)
    return heads * rows * features, rows * features, features, 1


def _appended(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The result of the operator for fake tensors."""
    batch, heads, count, features = new.shape
    length = count + (past.shape[2] if past.dim() > 1 else 0)
    return new.new_empty_strided((batch, heads, length, features), _strides(heads, length, features))


def _attend_appended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`attend_extended`, with strides that follow from the length alone."""
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
