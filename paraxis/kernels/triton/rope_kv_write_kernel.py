"""The Triton kernel of ``rope_kv_write.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 32
"""Rows of a program."""
WARPS = 4


@triton.jit
def _rotate(ptr, cos_ptr, sin_ptr, row, x_row, cos_row, inside, D: tl.constexpr):
    """``x * cos + rotate_half(x) * sin`` with the rounding of separate operators; zeros outside."""
    dtype = ptr.dtype.element_ty
    col = tl.arange(0, D)[None, :]
    half = tl.where(col < D // 2, col + D // 2, col - D // 2)
    sign = tl.where(col < D // 2, -1.0, 1.0)
    x = tl.load(ptr + row * x_row + col, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(ptr + row * x_row + half, mask=inside, other=0.0).to(tl.float32) * sign
    cos = tl.load(cos_ptr + row * cos_row + col, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * cos_row + col, mask=inside, other=0.0).to(tl.float32)
    a = (x * cos).to(dtype).to(tl.float32)
    b = (y * sin).to(dtype).to(tl.float32)
    return (a + b).to(dtype)


@triton.jit
def rope_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    start_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    rows,
    length,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    cos_batch,
    cos_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of rows, head, batch): ``H`` query heads, then ``G`` key heads and ``G`` value heads."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    col = tl.arange(0, D)[None, :]
    cos_ptr += batch * cos_batch
    sin_ptr += batch * cos_batch
    if head < H:
        inside = at < rows
        q = _rotate(q_ptr + batch * q_batch + head * q_head, cos_ptr, sin_ptr, at, q_row, cos_row, inside, D)
        tl.store(out_ptr + ((batch * rows + at) * H + head) * D + col, q, mask=inside)
    else:
        row = at - tl.load(start_ptr)
        inside = (row >= 0) & (row < rows)
        if head < H + G:
            group = head - H
            k = _rotate(k_ptr + batch * k_batch + group * k_head, cos_ptr, sin_ptr, row, k_row, cos_row, inside, D)
            tl.store(keys_ptr + ((batch * G + group) * length + at) * D + col, k, mask=at < length)
        else:
            group = head - H - G
            v = tl.load(v_ptr + batch * v_batch + group * v_head + row * v_row + col, mask=inside, other=0.0)
            tl.store(values_ptr + ((batch * G + group) * length + at) * D + col, v, mask=at < length)


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: torch.Tensor,
    rotated: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Fill the last three tensors, which ``rope_kv_write.allocate`` has made."""
    batch, heads, rows, features = query.shape
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    length = keys.shape[2]
    rope_kv_write_kernel[(triton.cdiv(max(rows, length), BLOCK), heads + 2 * key.shape[1], batch)](
        query,
        key,
        value,
        cos,
        sin,
        start,
        rotated,
        keys,
        values,
        rows,
        length,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        H=heads,
        G=key.shape[1],
        D=features,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
