"""Decode attention on a GPU: one query per sequence on a preallocated KV cache (split-K, as in FlashDecoding).

The keys are divided among programs, also where a rank has a single head, and a second kernel merges their results. With
``rope_decode_attention`` the kernel also applies RoPE to query and key and writes key and value to the KV cache, which
would otherwise be small kernels of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...compat.triton import gdc_launch_dependents, gdc_wait
from .shared_memory import shared_memory

MAX_SPLITS = 128
"""Programs per key head at most."""
MIN_PROGRAMS = 128
"""Programs that fill a device: with fewer pairs of sequence and key head, the keys of each are divided."""


@triton.jit
def _rotate(ptr, cos_ptr, sin_ptr, row, col, inside, D: tl.constexpr):
    """``x * cos + rotate_half(x) * sin`` with the rounding of separate operators."""
    dtype = ptr.dtype.element_ty
    half = tl.where(col < D // 2, col + D // 2, col - D // 2)
    sign = tl.where(col < D // 2, -1.0, 1.0)
    x = tl.load(ptr + row + col, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(ptr + row + half, mask=inside, other=0.0).to(tl.float32) * sign
    cos = tl.load(cos_ptr + col).to(tl.float32)
    sin = tl.load(sin_ptr + col).to(tl.float32)
    a = (x * cos).to(dtype).to(tl.float32)
    b = (y * sin).to(dtype).to(tl.float32)
    return (a + b).to(dtype)


@triton.jit
def merge_kernel(
    partial_ptr,
    stat_ptr,
    out_ptr,
    G: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (query head, batch): merges the partials of all splits, rescaled to one maximum."""
    head = tl.program_id(0)
    group = tl.program_id(1) * (tl.num_programs(0) // G) + head // G
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    splits = tl.arange(0, PADDED_SPLITS)
    d = tl.arange(0, D)
    valid = splits < SPLITS
    slot = (group * SPLITS + splits) * G + head % G
    partials = tl.load(partial_ptr + slot[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
    row_max = tl.load(stat_ptr + 2 * slot, mask=valid, other=float("-inf"))
    row_sum = tl.load(stat_ptr + 2 * slot + 1, mask=valid, other=0.0)
    overall_max = tl.max(row_max, 0)
    rescale = tl.exp(row_max - tl.where(overall_max == float("-inf"), 0.0, overall_max))
    total = tl.sum(rescale * row_sum, 0)
    result = tl.sum(partials * rescale[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (tl.program_id(1) * tl.num_programs(0) + head) * D + d, result.to(out_ptr.dtype.element_ty))


@triton.jit
def decode_attention_kernel(
    q_ptr,
    new_k_ptr,
    new_v_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    position_ptr,
    mask_ptr,
    partial_ptr,
    stat_ptr,
    out_ptr,
    scale,
    length,
    q_batch,
    q_head,
    new_k_batch,
    new_k_head,
    new_v_batch,
    new_v_head,
    cos_batch,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    mask_batch,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    STORE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (split, key head, batch): one of ``SPLITS`` equal parts of the keys, for ``G`` query heads.

    ``CAUSAL``: keys after the position are not visible, and nobody reads them. A matmul takes at least ``ROWS`` query
    heads. Results are relative to the program's maximum, which is stored beside the sum of exponentials. The new token
    is not read from the cache, which this kernel writes (``STORE``). ``PDL``: programmatic dependent launch.
    """
    dtype = q_ptr.dtype.element_ty
    split, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    g = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, D)[None, :]
    k_ptr += batch.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + head.to(tl.int64) * v_head
    cos_ptr += batch * cos_batch
    sin_ptr += batch * cos_batch
    rows = batch * q_batch + (head * G + g) * q_head
    end = length
    if CAUSAL or STORE:
        position = tl.load(position_ptr).to(tl.int32)
        position = tl.where(position < 0, position + length, position)
        if CAUSAL:
            end = tl.minimum(position + 1, length)
    part = tl.cdiv(tl.cdiv(end, SPLITS), BLOCK) * BLOCK
    start = split * part
    stop = tl.minimum(start + part, end)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    if STORE:
        q = _rotate(q_ptr, cos_ptr, sin_ptr, rows, d, g < G, D)
        row = batch * new_k_batch + head * new_k_head
        new_k = _rotate(new_k_ptr, cos_ptr, sin_ptr, row, d, d < D, D)
        new_v = tl.load(new_v_ptr + batch * new_v_batch + head * new_v_head + d)
        is_here = (position >= start) & (position < stop)
        tl.store(k_ptr + position.to(tl.int64) * k_row + d, new_k, mask=is_here & (d < D))
        tl.store(v_ptr + position.to(tl.int64) * v_row + d, new_v, mask=is_here & (d < D))
        new_score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
        seen = is_here
        if MASK == 1:
            seen = seen & (tl.load(mask_ptr + batch * mask_batch + position, mask=is_here, other=0) != 0)
        if MASK == 2:
            new_score += tl.load(mask_ptr + batch * mask_batch + position, mask=is_here, other=0.0).to(tl.float32)
        row_max = tl.where(seen, new_score, float("-inf"))
        row_sum = tl.where(seen & (new_score > float("-inf")), 1.0, 0.0)
        acc = tl.where(row_sum[:, None] > 0, new_v.to(tl.float32), acc)
    else:
        q = tl.load(q_ptr + rows + d, mask=g < G, other=0.0)
    for first in tl.range(start, stop, BLOCK, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK)
        visible = key < stop
        if STORE:
            visible = visible & (key != position)
        if MASK == 1:
            visible = tl.load(mask_ptr + batch * mask_batch + key, mask=visible, other=0) != 0
        at = key.to(tl.int64)[:, None]
        k = tl.load(k_ptr + at * k_row + d, mask=visible[:, None], other=0.0)
        v = tl.load(v_ptr + at * v_row + d, mask=visible[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASK == 2:
            score += tl.load(mask_ptr + batch * mask_batch + key, mask=visible, other=0.0).to(tl.float32)[None, :]
        score = tl.where(visible[None, :], score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp(row_max - base)
        p = tl.exp(score - base[:, None])
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    group = batch * heads + head
    if SPLITS == 1:
        result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        tl.store(out_ptr + (group * G + g) * D + d, result.to(dtype), mask=g < G)
    else:
        slot = (group * SPLITS + split) * G
        g1 = tl.arange(0, ROWS)
        tl.store(partial_ptr + (slot + g) * D + d, acc, mask=g < G)
        tl.store(stat_ptr + 2 * (slot + g1), row_max, mask=g1 < G)
        tl.store(stat_ptr + 2 * (slot + g1) + 1, row_sum, mask=g1 < G)


class Tiles(NamedTuple):
    """How the keys are divided: ``splits`` programs per key head, each in tiles of ``block`` keys."""

    splits: int
    block: int
    stages: int
    warps: int


def tiles(groups: int, length: int, key_bytes: int, shared_memory: int) -> Tiles:
    """Close to the fastest measured on an H200 with 1 to 512 such pairs; half of the shared memory stays free.

    Args:
        groups: How many such pairs there are.
        length: The positions of the KV cache.
        key_bytes: The memory of a key.
        shared_memory: What a program may use.
    """
    if groups >= MIN_PROGRAMS:
        block, stages, warps = 64, 2, 4
    elif groups >= MIN_PROGRAMS // 4:
        block, stages, warps = 64, 3, 4
    else:
        block, stages, warps = 128, 2, 8
    while block > 16 and 2 * stages * block * key_bytes > shared_memory // 2:  # keys and values
        if stages > 1:
            stages -= 1
        else:
            block //= 2
    splits = max(1, min(MAX_SPLITS, MIN_PROGRAMS // groups, triton.cdiv(length, block)))
    return Tiles(splits, block, stages, warps)


def launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    position: torch.Tensor | None = None,
    new: tuple[torch.Tensor, ...] | None = None,
    causal: bool = False,
    pdl: bool = True,
    sizes: Tiles | None = None,
) -> torch.Tensor:
    """Run the kernels; ``new`` is (key, value, cos, sin) of the new token: RoPE and the write are fused."""
    batch, heads, length, features = keys.shape
    groups = q.shape[1] // heads
    splits, block, stages, warps = sizes or tiles(
        batch * heads, length, features * keys.element_size(), shared_memory(q.device)
    )
    partials = q.new_empty((batch * q.shape[1] * splits * (features + 2),), dtype=torch.float32)
    stats = partials[batch * q.shape[1] * splits * features :]
    out = q.new_empty(q.shape)
    key, value, cos, sin = new or (q, q, q, q)
    q, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, key, value))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    decode_attention_kernel[(splits, heads, batch)](
        q,
        key,
        value,
        cos,
        sin,
        keys,
        values,
        q if position is None else position,
        q if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask,
        partials,
        stats,
        out,
        scale,
        length,
        q.stride(0),
        q.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cos.stride(0) if new is not None and cos.shape[0] > 1 else 0,
        *keys.stride()[:3],
        *values.stride()[:3],
        0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
        G=groups,
        ROWS=max(16, triton.next_power_of_2(groups)),
        D=features,
        BLOCK=block,
        STAGES=stages,
        SPLITS=splits,
        MASK=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        CAUSAL=causal,
        STORE=new is not None,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    if splits > 1:
        merge_kernel[(q.shape[1], batch)](
            partials,
            stats,
            out,
            G=groups,
            D=features,
            SPLITS=splits,
            PADDED_SPLITS=triton.next_power_of_2(splits),
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return out


@torch.library.custom_op("paraxis::decode_attention", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    position: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of one query per sequence, with grouped query heads where there are more of them than key heads. With a
    ``position``, keys after it are not visible."""
    return launch(q, keys, values, mask, scale, position, causal=position is not None)


@decode_attention.register_fake
def _(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    position: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op(
    "paraxis::rope_decode_attention", mutates_args=("keys", "values"), tags=(torch.Tag.flexible_layout,)
)
def rope_decode_attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Apply RoPE to query and key, write key and value to the KV cache at ``position``, and attend; if ``causal``, to
    the keys up to there."""
    return launch(q, keys, values, mask, scale, position, (key, value, cos, sin), causal)


@rope_decode_attention.register_fake
def _(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    return q.new_empty(q.shape)
