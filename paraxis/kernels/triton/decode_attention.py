"""Attention of one query per sequence on a cache of a fixed size.

The keys are divided among programs, also where a rank has a single head, and a second kernel puts their results
together. With ``rotate_store_attend`` the kernel also turns query and key by their position and writes key and value
into the cache, which would be small kernels of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 32
"""Keys that a program looks at together."""
WARPS = 4
SPLITS = 128
"""Programs per head of keys at most."""


@triton.jit
def _turned(ptr, cos_ptr, sin_ptr, row, col, inside, D: tl.constexpr):
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
    part_ptr,
    stat_ptr,
    out_ptr,
    G: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (query head, batch): the sum of what all programs found for it, put on one scale."""
    head = tl.program_id(0)
    own = tl.program_id(1) * (tl.num_programs(0) // G) + head // G
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    every = tl.arange(0, ALL)
    d = tl.arange(0, D)
    there = every < SPLITS
    place = (own * SPLITS + every) * G + head % G
    found = tl.load(part_ptr + place[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
    best = tl.load(stat_ptr + 2 * place, mask=there, other=float("-inf"))
    weight = tl.load(stat_ptr + 2 * place + 1, mask=there, other=0.0)
    top = tl.max(best, 0)
    fade = tl.exp(best - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(fade * weight, 0)
    result = tl.sum(found * fade[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (tl.program_id(1) * tl.num_programs(0) + head) * D + d, result.to(out_ptr.dtype.element_ty))


@triton.jit
def attend_kernel(
    q_ptr,
    new_k_ptr,
    new_v_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    position_ptr,
    mask_ptr,
    part_ptr,
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
    EARLY: tl.constexpr,
):
    """Program (split, head of keys, batch): ``BLOCK * STEPS`` keys for the ``G`` query heads on this head.

    Products take at least ``ROWS`` query heads. The scores of a program come without its largest one, which is kept
    beside their sum.
    """
    dtype = q_ptr.dtype.element_ty
    split, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    if EARLY:
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
        q = _turned(q_ptr, cos_ptr, sin_ptr, rows, d, g < G, D)
        row = batch * new_k_batch + head * new_k_head
        new_k = _turned(new_k_ptr, cos_ptr, sin_ptr, row, d, d < D, D)
        new_v = tl.load(new_v_ptr + batch * new_v_batch + head * new_v_head + d)
        position = tl.load(position_ptr).to(tl.int32)
        position = tl.where(position < 0, position + length, position)
        mine = (position >= start) & (position < tl.minimum(start + BLOCK * STEPS, length)) & (d < D)
        tl.store(k_ptr + position.to(tl.int64) * k_row + d, new_k, mask=mine)
        tl.store(v_ptr + position.to(tl.int64) * v_row + d, new_v, mask=mine)
    else:
        q = tl.load(q_ptr + rows + d, mask=g < G, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, D], tl.float32)
    for step in range(STEPS):
        key = start + step * BLOCK + tl.arange(0, BLOCK)
        seen = key < length
        if MASK == 1:
            seen = tl.load(mask_ptr + batch * mask_batch + key, mask=seen, other=0) != 0
        at = key.to(tl.int64)[:, None]
        k = tl.load(k_ptr + at * k_row + d, mask=seen[:, None], other=0.0)
        v = tl.load(v_ptr + at * v_row + d, mask=seen[:, None], other=0.0)
        if STORE:
            here = (key == position)[:, None]
            k = tl.where(here, new_k, k)
            v = tl.where(here, new_v, v)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASK == 2:
            score += tl.load(mask_ptr + batch * mask_batch + key, mask=seen, other=0.0).to(tl.float32)[None, :]
        score = tl.where(seen[None, :], score, float("-inf"))
        top = tl.maximum(best, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp(best - base)
        p = tl.exp(score - base[:, None])
        weight = weight * fade + tl.sum(p, 1)
        total = tl.dot(p.to(dtype), v, total * fade[:, None], input_precision="ieee")
        best = top
    own = batch * heads + head
    if SPLITS == 1:
        result = total / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out_ptr + (own * G + g) * D + d, result.to(dtype), mask=g < G)
    else:
        place = (own * SPLITS + split) * G
        g1 = tl.arange(0, ROWS)
        tl.store(part_ptr + (place + g) * D + d, total, mask=g < G)
        tl.store(stat_ptr + 2 * (place + g1), best, mask=g1 < G)
        tl.store(stat_ptr + 2 * (place + g1) + 1, weight, mask=g1 < G)


def launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    new: tuple[torch.Tensor, ...] | None = None,
    early: bool = True,
) -> torch.Tensor:
    """Run the kernel; ``new`` is (key, value, cos, sin, position) of the token, whose query is not turned yet."""
    batch, heads, length, features = keys.shape
    groups = q.shape[1] // heads
    steps = triton.cdiv(length, BLOCK * SPLITS)
    splits = triton.cdiv(length, BLOCK * steps)
    parts = q.new_empty((batch * q.shape[1] * splits * (features + 2),), dtype=torch.float32)
    stats = parts[batch * q.shape[1] * splits * features :]
    out = q.new_empty(q.shape)
    key, value, cos, sin, position = new or (q, q, q, q, q)
    q, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, key, value))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    attend_kernel[(splits, heads, batch)](
        q,
        key,
        value,
        cos,
        sin,
        keys,
        values,
        position,
        q if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask,
        parts,
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
        EARLY=early,
        num_warps=WARPS,
        launch_pdl=early,
    )
    if splits > 1:
        merge_kernel[(q.shape[1], batch)](
            parts,
            stats,
            out,
            G=groups,
            D=features,
            SPLITS=splits,
            ALL=triton.next_power_of_2(splits),
            EARLY=early,
            num_warps=4,
            launch_pdl=early,
        )
    return out


@torch.library.custom_op("paraxis::attend_row", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def attend_row(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of one query, each head of keys serving as many query heads as there are more of them."""
    return launch(q, keys, values, mask, scale)


@attend_row.register_fake
def _(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op(
    "paraxis::rotate_store_attend", mutates_args=("keys", "values"), tags=(torch.Tag.flexible_layout,)
)
def rotate_store_attend(
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
    """Turn query and key by ``cos`` and ``sin``, write key and value at ``position`` of the cache, and attend."""
    return launch(q, keys, values, mask, scale, (key, value, cos, sin, position))


@rotate_store_attend.register_fake
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
