"""Attention of many queries, each of which sees the rows up to its own, on a CPU.

For prompts of some hundred tokens torch's own kernel takes twice as long: its products are small ones of a library that
is made for large ones.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn.functional import scaled_dot_product_attention

from .build import LANES, call_of, in_rows, kernel, pointers, strides, threads_for

LONGEST = 1024
"""Rows up to which keys and values of a head stay in the second cache; from there on torch is as fast."""
SIDE, QUERIES = 16, 6
"""Rows of keys that lie side by side, and queries at a time; as in the kernel."""

_Call = call_of(
    "query keys values out room",
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
    alike = features == keys.shape[3] == values.shape[3] and keys.shape[1] == values.shape[1]
    if not alike or not features or features % LANES or not keys.shape[1]:
        return False
    return query.shape[1] % keys.shape[1] == 0


def prefill_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention where query number n sees the first n + 1 rows, as [batch, heads, queries, features]."""
    batch, heads, length, features = keys.shape
    queries, groups = query.shape[2], query.shape[1] // heads
    threads = threads_for(batch * heads) if length <= LONGEST else 0
    alike = values.shape == keys.shape and query.shape == (batch, heads * groups, queries, features)
    function = kernel("prefill_attention") if threads and length and queries and alike else None
    out = _like(query, keys, values, scale)
    if function is None:
        shared = groups > 1
        return out.copy_(
            scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=shared)
        )
    given = in_rows((query, keys, values))
    room = query.new_empty(threads * (length + SIDE) * (features + QUERIES))
    sizes = (threads, batch, heads, groups, queries, length, features, *strides((*given, out), 3))
    function(ctypes.byref(_Call(*pointers((*given, out, room)), *sizes, scale)))
    return out


def _like(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    batch, heads, queries, features = query.shape
    return query.new_empty((batch, queries, heads, features)).transpose(1, 2)


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define("prefill_attention(Tensor query, Tensor keys, Tensor values, float scale) -> Tensor")
_library.impl("prefill_attention", prefill_attention, "CPU")
torch.library.register_fake("paraxis::prefill_attention", _like, lib=_library)
