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

from ..sharded import unwrap

aten = torch.ops.aten
LEAST = 64
"""Rows of room, at least; beyond that an eighth of the length."""


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


def append(past: torch.Tensor, new: torch.Tensor, dim: int, rows_first: bool = False) -> torch.Tensor:
    """``torch.cat([past, new], dim)``, in the memory of ``past`` if there is room behind it that nobody has.

    With ``rows_first`` the rows lie one after the other, each with all batches and heads: how the result is laid out
    does not depend on the room then.
    """
    if torch.is_grad_enabled() and (past.requires_grad or new.requires_grad):
        return torch.cat([past, new], dim)
    length = past.shape[dim] if past.dim() > 1 else 0
    size = list(new.shape)
    size[dim] += length
    if length:
        memory = past.untyped_storage()
        if getattr(memory, "filled", None) == length and past.storage_offset() == 0:
            room = _room(past, dim, rows_first)
            if size[dim] <= room:
                result = past.as_strided(size, past.stride())
                result.narrow(dim, length, new.shape[dim]).copy_(new)
                memory.filled = size[dim]  # type: ignore[attr-defined]
                return result
    rows = size[dim] + max(LEAST, size[dim] // 8)
    with torch.inference_mode(False):  # to be written to in any mode
        outer, inner = size[:dim], size[dim + 1 :]
        shape = (rows, *outer, *inner) if rows_first else (*outer, rows, *inner)
        buffer = torch.empty(shape, dtype=new.dtype, device=new.device)
    result = (buffer.movedim(0, dim) if rows_first else buffer).narrow(dim, 0, size[dim])
    if length:
        result.narrow(dim, 0, length).copy_(past)
    result.narrow(dim, length, new.shape[dim]).copy_(new)
    result.untyped_storage().filled = size[dim]  # type: ignore[attr-defined]
    return result


def _room(past: torch.Tensor, dim: int, rows_first: bool) -> int:
    """How many rows fit into the memory of a tensor, if it is laid out as wanted."""
    if not rows_first:
        return past.stride(dim - 1) // past.stride(dim) if past.stride(dim) else 0
    if past.stride() != _strides(past):
        return 0
    return past.untyped_storage().nbytes() // past.element_size() // past.stride(dim)


def _strides(like: torch.Tensor) -> tuple[int, int, int, int]:
    """Those of a tensor [batch, heads, rows, features] whose rows lie one after the other."""
    batch, heads, _, features = like.shape
    return heads * features, features, batch * heads * features, 1


def _appended(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What the operator gives, without data."""
    batch, heads, count, features = new.shape
    length = past.shape[2] if past.dim() > 1 else 0
    return new.new_empty_strided((batch, heads, length + count, features), _strides(new))


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define("append_rows(Tensor past, Tensor new) -> Tensor")
_library.impl("append_rows", lambda past, new: append(past, new, 2, rows_first=True), "CPU")
torch.library.register_fake("paraxis::append_rows", _appended, lib=_library)
