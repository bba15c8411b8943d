"""Attention on a paged KV cache on a GPU: decode steps of many sequences, and prefill chunks, of any lengths.

Everything that differs from step to step is in tensors on the device (which blocks a sequence has, how long it is), so
that a step can be replayed as a CUDA graph. Keys are found through the table of blocks, whatever the size of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...compat.paged_attention import Scoring
from .shared_memory import shared_memory

PROGRAMS = 256
"""Programs that fill a device: with fewer pairs of sequence and KV head, the keys of each are divided."""
MAX_SPLITS = 64
"""Parts of the keys of a sequence at most."""
TILE_ROWS = 64
"""Rows of a prefill tile: pairs of a token and a query head."""


@triton.jit
def _update(q, k, v, visible, scale, softcap, row_max, row_sum, acc, SOFTCAP: tl.constexpr):
    """One tile of keys: the online softmax, relative to the maximum so far."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        x = score / softcap
        score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)  # tanh
    score = tl.where(visible, score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp(row_max - base)
    p = tl.exp(score - base[:, None])
    row_sum = row_sum * rescale + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _load_keys(
    k_ptr, v_ptr, table_ptr, key, inside, size, k_row, v_row, DK: tl.constexpr, DV: tl.constexpr,
    PADDED_DK: tl.constexpr, PADDED_DV: tl.constexpr,
):  # fmt: skip
    """Keys and values at these positions of a sequence."""
    block = tl.load(table_ptr + key // size, mask=inside, other=0).to(tl.int64)
    slot = (block * size + key % size)[:, None]
    dk, dv = tl.arange(0, PADDED_DK)[None, :], tl.arange(0, PADDED_DV)[None, :]
    k = tl.load(k_ptr + slot * k_row + dk, mask=inside[:, None] & (dk < DK), other=0.0)
    v = tl.load(v_ptr + slot * v_row + dv, mask=inside[:, None] & (dv < DV), other=0.0)
    return k, v


@triton.jit
def paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, row_ptr, sink_ptr, partial_ptr, stat_ptr, out_ptr,
    scale, softcap, window, size, q_row, q_head, k_head, k_row, v_head, v_row, table_row, out_row, out_head,
    G: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PADDED_DK: tl.constexpr,
    PADDED_DV: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (split, KV head, sequence): one of ``SPLITS`` equal parts of the visible keys, for ``G`` query heads."""
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    row = tl.load(row_ptr + sequence).to(tl.int64)
    length = tl.load(length_ptr + sequence).to(tl.int32)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    part = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    start = first + split * part
    stop = tl.minimum(start + part, length)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, PADDED_DK)[None, :]
    q_at = q_ptr + row * q_row + (head * G + g)[:, None] * q_head + d
    q = tl.load(q_at, mask=(g < G)[:, None] & (d < DK), other=0.0)
    k_ptr += head.to(tl.int64) * k_head
    v_ptr += head.to(tl.int64) * v_head
    table_ptr += sequence.to(tl.int64) * table_row
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DV], tl.float32)
    if SINKS:
        if split == 0:
            row_max = tl.load(sink_ptr + head * G + g, mask=g < G, other=float("-inf")).to(tl.float32)
            row_sum = tl.where(g < G, 1.0, 0.0)
    for at in tl.range(start, stop, BLOCK, num_stages=STAGES):
        key = at + tl.arange(0, BLOCK)
        inside = key < stop
        k, v = _load_keys(k_ptr, v_ptr, table_ptr, key, inside, size, k_row, v_row, DK, DV, PADDED_DK, PADDED_DV)
        row_max, row_sum, acc = _update(
            q, k, v, inside[None, :], scale, softcap, row_max, row_sum, acc, SOFTCAP
        )  # fmt: skip
    e = tl.arange(0, PADDED_DV)[None, :]
    inside_out = (g < G)[:, None] & (e < DV)
    if SPLITS == 1:
        result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        out_at = out_ptr + row * out_row + (head * G + g)[:, None] * out_head + e
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=inside_out)
    else:
        slot = ((sequence * heads + head) * SPLITS + split) * G
        tl.store(partial_ptr + (slot + g)[:, None] * DV + e, acc, mask=inside_out)
        tl.store(stat_ptr + 2 * (slot + g), row_max, mask=g < G)
        tl.store(stat_ptr + 2 * (slot + g) + 1, row_sum, mask=g < G)


@triton.jit
def paged_merge_kernel(
    partial_ptr, stat_ptr, row_ptr, out_ptr, out_row, out_head,
    G: tl.constexpr, DV: tl.constexpr, PADDED_DV: tl.constexpr, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (query head, sequence): merges the partial results of all splits, rescaled to one maximum."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    group = sequence * (tl.num_programs(0) // G) + head // G
    row = tl.load(row_ptr + sequence).to(tl.int64)
    split = tl.arange(0, PADDED_SPLITS)
    d = tl.arange(0, PADDED_DV)
    slot = (group * SPLITS + split) * G + head % G
    inside = split < SPLITS
    partials = tl.load(
        partial_ptr + slot[:, None] * DV + d[None, :], mask=inside[:, None] & (d < DV)[None, :], other=0.0
    )
    row_max = tl.load(stat_ptr + 2 * slot, mask=inside, other=float("-inf"))
    row_sum = tl.load(stat_ptr + 2 * slot + 1, mask=inside, other=0.0)
    largest = tl.max(row_max, 0)
    rescale = tl.exp(row_max - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(rescale * row_sum, 0)
    result = tl.sum(partials * rescale[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * out_row + head * out_head + d, result.to(out_ptr.dtype.element_ty), mask=d < DV)


@triton.jit
def paged_prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, tile_ptr, sink_ptr, out_ptr,
    scale, softcap, window, size, q_row, q_head, k_head, k_row, v_head, v_row, table_row, out_row, out_head,
    G: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PADDED_DK: tl.constexpr,
    PADDED_DV: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head): ``ROWS`` pairs of a new token and a query head, all of one sequence.

    A tile is five numbers: its sequence, its first pair, the first token of the sequence in the step, how many tokens
    it has there, and how many positions come before them.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    tile_ptr += tile * 5
    sequence = tl.load(tile_ptr).to(tl.int64)
    pair = tl.load(tile_ptr + 1).to(tl.int32) + tl.arange(0, ROWS)
    begin = tl.load(tile_ptr + 2).to(tl.int64)
    tokens = tl.load(tile_ptr + 3).to(tl.int32)
    past = tl.load(tile_ptr + 4).to(tl.int32)
    token, group = pair // G, pair % G
    valid = token < tokens
    position = past + token
    d = tl.arange(0, PADDED_DK)[None, :]
    at_row = (begin + token)[:, None]
    q_at = q_ptr + at_row * q_row + (head * G + group)[:, None] * q_head + d
    q = tl.load(q_at, mask=valid[:, None] & (d < DK), other=0.0)
    k_ptr += head.to(tl.int64) * k_head
    v_ptr += head.to(tl.int64) * v_head
    table_ptr += sequence * table_row
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DV], tl.float32)
    if SINKS:
        row_max = tl.load(sink_ptr + head * G + group).to(tl.float32)
        row_sum = row_sum + 1.0
    stop = past + tl.minimum(tl.max(token, 0) + 1, tokens)
    start = 0
    if WINDOW:
        start = tl.maximum(past + tl.min(token, 0) - window + 1, 0)
    for at in tl.range(start, stop, BLOCK, num_stages=STAGES):
        key = at + tl.arange(0, BLOCK)
        inside = key < stop
        k, v = _load_keys(k_ptr, v_ptr, table_ptr, key, inside, size, k_row, v_row, DK, DV, PADDED_DK, PADDED_DV)
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        row_max, row_sum, acc = _update(q, k, v, visible, scale, softcap, row_max, row_sum, acc, SOFTCAP)
    result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    e = tl.arange(0, PADDED_DV)[None, :]
    out_at = out_ptr + at_row * out_row + (head * G + group)[:, None] * out_head + e
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (e < DV))


def fits(query: Tensor, keys: Tensor) -> bool:
    """Whether the kernels can be used: (tokens, heads, size), and (KV heads, slots, size)."""
    heads = keys.shape[0]
    return heads > 0 and query.shape[1] > 0 and query.shape[1] % heads == 0 and query.stride(2) == 1


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    rows: Tensor,
    lengths: Tensor,
    tables: Tensor,
    block_size: int,
    how: Scoring,
) -> None:
    """Attention of one token of each sequence, into its row of ``out``.

    Args:
        query: (tokens, heads, size).
        keys, values: (KV heads, slots, size); those of the new tokens are there already.
        out: (tokens, heads, size of a value).
        rows: The token of each sequence.
        lengths: Its positions, the token itself included; 0 for a row that is padding.
        tables: Its blocks, one row per sequence.
        block_size: Slots of a block.
        how: How scores are computed.
    """
    heads, sequences = keys.shape[0], rows.shape[0]
    groups, sizes = query.shape[1] // heads, _sizes(keys, values)
    splits = max(1, min(MAX_SPLITS, PROGRAMS // (sequences * heads)))
    block, stages = _tile(keys, values)
    stats = query.new_empty((sequences * query.shape[1] * splits * (values.shape[2] + 2),), dtype=torch.float32)
    partials = stats[2 * sequences * query.shape[1] * splits :]
    paged_decode_kernel[(splits, heads, sequences)](
        query,
        keys,
        values,
        tables,
        lengths,
        rows,
        query if how.sinks is None else how.sinks,
        partials,
        stats,
        out,
        how.scale,
        how.softcap,
        how.window,
        block_size,
        *query.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        tables.stride(0),
        *out.stride()[:2],
        G=groups,
        ROWS=max(16, triton.next_power_of_2(groups)),
        **sizes,
        BLOCK=block,
        STAGES=stages,
        SPLITS=splits,
        WINDOW=bool(how.window),
        SOFTCAP=bool(how.softcap),
        SINKS=how.sinks is not None,
        num_warps=4,
    )
    if splits > 1:
        paged_merge_kernel[(query.shape[1], sequences)](
            partials,
            stats,
            rows,
            out,
            *out.stride()[:2],
            G=groups,
            DV=sizes["DV"],
            PADDED_DV=sizes["PADDED_DV"],
            SPLITS=splits,
            PADDED_SPLITS=triton.next_power_of_2(splits),
            num_warps=4,
        )


def tile_list(sequences: list[tuple[int, int, int, int]], groups: int) -> list[tuple[int, int, int, int, int]]:
    """The tiles of a prefill: (sequence, first pair, first token, tokens, positions before).

    Args:
        sequences: (row of the table, first token in the step, tokens, positions before).
        groups: Query heads of a KV head.
    """
    return [
        (row, pair, start, tokens, past)
        for row, start, tokens, past in sequences
        for pair in range(0, tokens * groups, TILE_ROWS)
    ]


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    tiles: Tensor,
    tables: Tensor,
    block_size: int,
    how: Scoring,
) -> None:
    """Attention of several new tokens of each sequence, into their rows of ``out``.

    Args:
        query, keys, values, out, tables, block_size, how: As in :func:`paged_decode`.
        tiles: (tiles, 5), by :func:`tile_list`.
    """
    heads = keys.shape[0]
    block, stages = _tile(keys, values)
    paged_prefill_kernel[(tiles.shape[0], heads)](
        query,
        keys,
        values,
        tables,
        tiles,
        query if how.sinks is None else how.sinks,
        out,
        how.scale,
        how.softcap,
        how.window,
        block_size,
        *query.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        tables.stride(0),
        *out.stride()[:2],
        G=query.shape[1] // heads,
        ROWS=TILE_ROWS,
        **_sizes(keys, values),
        BLOCK=block,
        STAGES=stages,
        WINDOW=bool(how.window),
        SOFTCAP=bool(how.softcap),
        SINKS=how.sinks is not None,
        num_warps=4,
    )


def _sizes(keys: Tensor, values: Tensor) -> dict[str, int]:
    """Of a key and a value, and powers of two that hold them."""
    dk, dv = keys.shape[2], values.shape[2]
    padded = [max(16, triton.next_power_of_2(d)) for d in (dk, dv)]
    return {"DK": dk, "DV": dv, "PADDED_DK": padded[0], "PADDED_DV": padded[1]}


def _tile(keys: Tensor, values: Tensor) -> tuple[int, int]:
    """Keys of a tile, and how many tiles are being loaded at a time: half of the shared memory stays free."""
    size = sum(max(16, triton.next_power_of_2(x.shape[2])) for x in (keys, values)) * keys.element_size()
    room, block, stages = shared_memory(keys.device) // 2, 64, 2
    while block > 16 and block * stages * size > room:
        if stages > 1:
            stages -= 1
        else:
            block //= 2
    return block, stages
