"""Prefill: RoPE on query and key, and the write of key and value to an empty KV cache, as one operator.

As separate operators these are a kernel each, with two more that clear the KV cache: for a rank with a single key head
they take longer to launch than to run.
"""

from __future__ import annotations

from typing import Any

import torch


def allocate(query: torch.Tensor, key: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty results: the query as [batch, heads, rows, features], contiguous by rows, and a KV cache of ``length``."""
    batch, heads, rows, features = query.shape
    rotated = query.new_empty((batch, rows, heads, features)).transpose(1, 2)
    keys, values = (key.new_empty((batch, key.shape[1], length, features)) for _ in range(2))
    return rotated, keys, values


def _with_operators(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: torch.Tensor,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``cos`` and ``sin`` are [batch or 1, rows, features]; ``start`` is the position of the first row in the cache."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat([-high, low], -1) * sin.unsqueeze(1)

    rotated, keys, values = allocate(query, key, length)
    rotated.copy_(rotate(query))
    at = torch.arange(query.shape[2], device=query.device) + start.reshape(())
    for cache, rows in ((keys, rotate(key)), (values, value)):
        cache.zero_().index_copy_(2, at, rows)
    return rotated, keys, values


def _with_kernel(
    query: torch.Tensor, key: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .rope_kv_write_kernel import launch

    value, cos, sin, start, length = others
    results = allocate(query, key, length)
    launch(query, key, value, cos, sin, start, *results)
    return results


def _fake(query: torch.Tensor, key: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return allocate(query, key, others[-1])


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define(
    "rope_kv_write(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor start, int length)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.flexible_layout,),
)
_library.impl("rope_kv_write", _with_operators, "CPU")
_library.impl("rope_kv_write", _with_kernel, "CUDA")
torch.library.register_fake("paraxis::rope_kv_write", _fake, lib=_library)
