"""Decode attention on a GPU: one query per sequence on a preallocated KV cache (split-K, as in FlashDecoding).

The keys are divided among programs, also where a rank has a single head, and a second kernel merges their results. With
``rope_decode_attention`` the kernel also applies RoPE to query and key and writes key and value to the KV cache, which
would otherwise be small kernels of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...compat.triton import gdc_launch_dependents, gdc_wait

BLOCK = 32
"""Keys of a tile."""
WARPS = 4
MAX_SPLITS = 128
"""Programs per key head at most."""
MAX_PROGRAMS = 1024
"""Programs at most, where there are several key heads or sequences: more of them do not run at the same time, and each
writes its partial result and reads the queries."""


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
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    MASK: tl.constexpr,
    STORE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (split, key head, batch): ``BLOCK * STEPS`` keys for the ``G`` query heads of this key head.

    A matmul takes at least ``ROWS`` query heads. Results are relative to the program's maximum, which is stored beside
    the sum of exponentials. ``PDL``: programmatic dependent launch.
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
    start = split * BLOCK * STEPS
    if STORE:
        q = _rotate(q_ptr, cos_ptr, sin_ptr, rows, d, g < G, D)
        row = batch * new_k_batch + head * new_k_head
        new_k = _rotate(new_k_ptr, cos_ptr, sin_ptr, row, d, d < D, D)
        new_v = tl.load(new_v_ptr + batch * new_v_batch + head * new_v_head + d)
        position = tl.load(position_ptr).to(tl.int32)
        position = tl.where(position < 0, position + length, position)
        is_here = (position >= start) & (position < tl.minimum(start + BLOCK * STEPS, length)) & (d < D)
        tl.store(k_ptr + position.to(tl.int64) * k_row + d, new_k, mask=is_here)
        tl.store(v_ptr + position.to(tl.int64) * v_row + d, new_v, mask=is_here)
    else:
        q = tl.load(q_ptr + rows + d, mask=g < G, other=0.0)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for step in range(STEPS):
        key = start + step * BLOCK + tl.arange(0, BLOCK)
        visible = key < length
        if MASK == 1:
            visible = tl.load(mask_ptr + batch * mask_batch + key, mask=visible, other=0) != 0
        at = key.to(tl.int64)[:, None]
        k = tl.load(k_ptr + at * k_row + d, mask=visible[:, None], other=0.0)
        v = tl.load(v_ptr + at * v_row + d, mask=visible[:, None], other=0.0)
        if STORE:
            is_new = (key == position)[:, None]
            k = tl.where(is_new, new_k, k)
            v = tl.where(is_new, new_v, v)
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


def launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    new: tuple[torch.Tensor, ...] | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Run the kernels; ``new`` is (key, value, cos, sin, position) of the new token: RoPE and the write are fused."""
    batch, heads, length, features = keys.shape
    groups = q.shape[1] // heads
    steps = triton.cdiv(length, BLOCK * max(1, min(MAX_SPLITS, MAX_PROGRAMS // (batch * heads))))
    splits = triton.cdiv(length, BLOCK * steps)
    partials = q.new_empty((batch * q.shape[1] * splits * (features + 2),), dtype=torch.float32)
    stats = partials[batch * q.shape[1] * splits * features :]
    out = q.new_empty(q.shape)
    key, value, cos, sin, position = new or (q, q, q, q, q)
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
        position,
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
        BLOCK=BLOCK,
        STEPS=steps,
        SPLITS=splits,
        MASK=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        STORE=new is not None,
        PDL=pdl,
        num_warps=WARPS,
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
    scale: float,
) -> torch.Tensor:
    """Attention of one query per sequence, with grouped query heads where there are more of them than key heads."""
    return launch(q, keys, values, mask, scale)


@decode_attention.register_fake
def _(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
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
    scale: float,
) -> torch.Tensor:
    """Apply RoPE to query and key, write key and value to the KV cache at ``position``, and attend."""
    return launch(q, keys, values, mask, scale, (key, value, cos, sin, position))


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
    scale: float,
) -> torch.Tensor:
    return q.new_empty(q.shape)
