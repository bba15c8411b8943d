"""Decode attention on a paged KV cache, on a CPU: one query of each of many sequences of any length.

torch has no such operator: the blocks of a sequence would be gathered, which writes and reads once more what attention
is bound by reading once, and each sequence would be a call of its own.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .build import LANES, call_struct, load_kernel, pointers

_Call = call_struct(
    "query keys values out scores rows lengths blocks",
    "threads sequences heads groups features block table longest window query_row query_head out_row head",
    "scale",
)


def fits(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, softcap: float) -> bool:
    """Whether the kernel can be used for these: (tokens, heads, size), and (KV heads, slots, size)."""
    features = keys.shape[2]
    if sinks is not None or softcap or query.dtype != torch.float32 or not query.is_cpu or keys.dtype != torch.float32:
        return False
    if features % LANES or not features or values.shape != keys.shape or not keys.shape[0]:
        return False
    return query.shape[1] % keys.shape[0] == 0 and query.stride(2) == 1 and load_kernel("paged_attention") is not None


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    rows: Tensor,
    lengths: Tensor,
    blocks: Tensor,
    block_size: int,
    scale: float,
    window: int,
) -> None:
    """Attention of one token of each sequence, into its row of ``out``.

    Args:
        query, keys, values: As in :func:`fits`.
        out: (tokens, heads, size), contiguous.
        rows: The token of each sequence.
        lengths: Its positions, the token itself included.
        blocks: Its blocks, one row per sequence.
        block_size: Slots of a block.
        scale: Of the scores.
        window: How many positions a token sees; 0 for all.
    """
    function = load_kernel("paged_attention")
    heads, features = keys.shape[0], keys.shape[2]
    groups, longest = query.shape[1] // heads, int(lengths.max())
    threads = min(torch.get_num_threads(), len(rows) * heads)
    scores = query.new_empty(threads * groups * longest)
    sizes = (threads, len(rows), heads, groups, features, block_size, blocks.shape[1], longest, window)
    strides = (query.stride(0), query.stride(1), out.stride(0), keys.stride(0))
    tensors = (query, keys, values, out, scores, rows, lengths, blocks)
    function(ctypes.byref(_Call(*pointers(tensors), *sizes, *strides, scale)))
