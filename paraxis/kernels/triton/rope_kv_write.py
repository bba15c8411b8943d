"""Query, key and value of a prompt, turned by their positions and put where attention and the cache want them.

As operators these are a kernel each, with two more that empty the cache: for a rank with a single head of keys they
take longer to start than to run.
"""

from __future__ import annotations

from typing import Any

import torch


def places(query: torch.Tensor, key: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for the results: the query as [batch, heads, rows, features] whose rows lie side by side, and two caches."""
    batch, heads, rows, features = query.shape
    turned = query.new_empty((batch, rows, heads, features)).transpose(1, 2)
    keys, values = (key.new_empty((batch, key.shape[1], length, features)) for _ in range(2))
    return turned, keys, values


def _by_operators(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: torch.Tensor,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``cos`` and ``sin`` are [batch or 1, rows, features]; ``start`` is where in the caches the first row goes."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat([-high, low], -1) * sin.unsqueeze(1)

    turned, keys, values = places(query, key, length)
    turned.copy_(turn(query))
    at = torch.arange(query.shape[2], device=query.device) + start.reshape(())
    for cache, rows in ((keys, turn(key)), (values, value)):
        cache.zero_().index_copy_(2, at, rows)
    return turned, keys, values


def _by_kernel(query: torch.Tensor, key: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .rope_kv_write_kernel import launch

    value, cos, sin, start, length = others
    results = places(query, key, length)
    launch(query, key, value, cos, sin, start, *results)
    return results


def _like(query: torch.Tensor, key: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return places(query, key, others[-1])


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define(
    "rotate_place(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor start, int length)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.flexible_layout,),
)
_library.impl("rotate_place", _by_operators, "CPU")
_library.impl("rotate_place", _by_kernel, "CUDA")
torch.library.register_fake("paraxis::rotate_place", _like, lib=_library)
