"""Prefill attention on a CPU: many queries with a causal mask.

For prompts of some hundred tokens torch's own kernel takes twice as long: it calls a GEMM library on matrices too small
for it.
"""

from __future__ import annotations

import ctypes

import torch

from ...compat.torch import scaled_dot_product_attention
from .build import LANES, call_struct, contiguous_rows, load_kernel, pointers, strides, threads_for

MAX_LENGTH = 1024
"""Keys per head up to which keys and values stay in the L2 cache; beyond that torch is as fast."""
KEY_BLOCK, QUERY_BLOCK = 16, 6
"""Keys that are packed side by side, and queries of a tile; as in the kernel."""

_Call = call_struct(
    "query keys values out scratch",
    "threads batch heads groups queries length features query_batch query_head query_row keys_batch keys_head keys_row "
    "values_batch values_head values_row out_batch out_head out_row",
    "scale",
)


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel can be used for tensors like these, which may be fake."""
    features = query.shape[3]
    known = all(isinstance(n, int) for n in (features, keys.shape[3], values.shape[3], query.shape[1], keys.shape[1]))
    if not known or any(x.dtype != torch.float32 or not x.is_cpu for x in (query, keys, values)):
        return False
    matching = features == keys.shape[3] == values.shape[3] and keys.shape[1] == values.shape[1]
    if not matching or not features or features % LANES or not keys.shape[1]:
        return False
    return query.shape[1] % keys.shape[1] == 0


def prefill_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention: query n attends to the first n + 1 keys. The result is [batch, heads, queries, features]."""
    batch, heads, length, features = keys.shape
    queries, groups = query.shape[2], query.shape[1] // heads
    threads = threads_for(batch * heads) if length <= MAX_LENGTH else 0
    matching = values.shape == keys.shape and query.shape == (batch, heads * groups, queries, features)
    function = load_kernel("prefill_attention") if threads and length and queries and matching else None
    out = _allocate(query, keys, values, scale)
    if function is None:
        gqa = groups > 1
        return out.copy_(scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=gqa))
    inputs = contiguous_rows((query, keys, values))
    scratch = query.new_empty(threads * (length + KEY_BLOCK) * (features + QUERY_BLOCK))
    sizes = (threads, batch, heads, groups, queries, length, features, *strides((*inputs, out), 3))
    function(ctypes.byref(_Call(*pointers((*inputs, out, scratch)), *sizes, scale)))
    return out


def _allocate(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    batch, heads, queries, features = query.shape
    return query.new_empty((batch, queries, heads, features)).transpose(1, 2)


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define("prefill_attention(Tensor query, Tensor keys, Tensor values, float scale) -> Tensor")
_library.impl("prefill_attention", prefill_attention, "CPU")
torch.library.register_fake("paraxis::prefill_attention", _allocate, lib=_library)
