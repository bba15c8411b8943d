"""Attention of one query per sequence on a growing cache, on a CPU.

torch's own kernel is made for many queries. Of one it takes half as long again as reading the cache does, and the cache
has to be extended before, by operators that take time of their own for every layer.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn.functional import scaled_dot_product_attention

from .build import LANES, call_of, in_rows, kernel, pointers, strides, threads_for

_Call = call_of(
    "query new_keys new_values keys values out scores",
    "threads batch heads groups length features query_batch query_head keys_batch keys_head values_batch values_head "
    "cache_batch cache_head",
    "scale",
)


def fits(query: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether the kernel can be used for tensors like these, which may be fake."""
    rows, features = new.shape[2], new.shape[3]
    known = all(isinstance(n, int) for n in (rows, features, query.shape[1], query.shape[2], new.shape[1]))
    if not known or query.dtype != torch.float32 or new.dtype != torch.float32 or not query.is_cpu:
        return False
    if rows != 1 or query.shape[2] != 1 or not features or features % LANES or features != query.shape[3]:
        return False
    return bool(new.shape[1]) and query.shape[1] % new.shape[1] == 0


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Write the last row of keys and values, and attend to all of them. The rows of a head lie together."""
    if keys.shape != values.shape:
        raise RuntimeError(f"there are keys of shape {tuple(keys.shape)} and values of shape {tuple(values.shape)}")
    batch, heads, length, features = keys.shape
    groups, threads = query.shape[1] // heads, threads_for(batch * heads)
    laid = keys.stride() == values.stride() and keys.stride()[2:] == (features, 1)
    alike = query.shape == (batch, heads * groups, 1, features)
    function = kernel("decode_attention") if threads and laid and alike else None
    if function is None:
        for cache, new in ((keys, new_keys), (values, new_values)):
            cache.narrow(2, length - 1, 1).copy_(new)
        attended = scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=groups > 1)
        return attended.contiguous()
    out, scores = query.new_empty(query.shape), query.new_empty(threads * groups * length)
    given = in_rows((query, new_keys, new_values))
    sizes = (threads, batch, heads, groups, length, features, *strides((*given, keys), 2))
    function(ctypes.byref(_Call(*pointers((*given, keys, values, out, scores)), *sizes, scale)))
    return out
