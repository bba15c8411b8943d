"""Decode attention on a CPU: one query per sequence, and a KV cache that is appended to.

torch's own kernel is made for many queries. With one query it takes half as long again as reading the KV cache does,
and appending to the cache takes further operators in every layer.
"""

from __future__ import annotations

import ctypes

import torch

from ...compat.torch import scaled_dot_product_attention
from .build import LANES, call_struct, contiguous_rows, load_kernel, pointers, strides, threads_for

_Call = call_struct(
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
    """Append ``new_keys`` and ``new_values`` as the last row of the KV cache, and attend to all rows.

    The rows of a head of the cache are contiguous; the last one is allocated and not written yet.
    """
    if keys.shape != values.shape:
        raise RuntimeError(f"keys of shape {tuple(keys.shape)} do not match values of shape {tuple(values.shape)}")
    batch, heads, length, features = keys.shape
    groups, threads = query.shape[1] // heads, threads_for(batch * heads)
    contiguous = keys.stride() == values.stride() and keys.stride()[2:] == (features, 1)
    matching = query.shape == (batch, heads * groups, 1, features)
    function = load_kernel("decode_attention") if threads and contiguous and matching else None
    if function is None:
        for cache, new in ((keys, new_keys), (values, new_values)):
            cache.narrow(2, length - 1, 1).copy_(new)
        attended = scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=groups > 1)
        return attended.contiguous()
    out, scores = query.new_empty(query.shape), query.new_empty(threads * groups * length)
    inputs = contiguous_rows((query, new_keys, new_values))
    sizes = (threads, batch, heads, groups, length, features, *strides((*inputs, keys), 2))
    function(ctypes.byref(_Call(*pointers((*inputs, keys, values, out, scores)), *sizes, scale)))
    return out
