"""GEMV on a GPU: linear layers on a single row, which read their weights once, at the bandwidth of the memory.

The operators right before and after cost more as separate kernels than their arithmetic takes, so they are fused: the
residual sum and RMSNorm before, the SiLU gate of a feed-forward layer after. Layers on the same input are one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...compat.triton import gdc_launch_dependents, gdc_wait

MAX_WEIGHTS = 3
"""Weights per kernel: query, key and value."""


@triton.jit
def gemv_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    sum_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    rows0,
    rows1,
    rows2,
    weight1,
    weight2,
    bias1,
    bias2,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BLOCK_N`` rows of one of the weights per program; gated: of both.

    ``weight1`` and ``weight2`` are the offsets of the other weights from the first one in memory. Weights do not depend
    on earlier kernels: their first block is loaded before those have finished (``PDL``: programmatic dependent launch).
    """
    dtype = x_ptr.dtype.element_ty
    pid = tl.program_id(0)
    tiles0 = tl.cdiv(rows0, BLOCK_N)
    tiles1 = tl.cdiv(rows1, BLOCK_N)
    if GATED:
        tile, rows, first = pid, rows0, 0
        w_ptr, b_ptr = weight_ptr, bias_ptr
    else:
        second, third = pid >= tiles0, pid >= tiles0 + tiles1
        tile = pid - tl.where(third, tiles0 + tiles1, tl.where(second, tiles0, 0))
        rows = tl.where(third, rows2, tl.where(second, rows1, rows0))
        first = tl.where(third, rows0 + rows1, tl.where(second, rows0, 0))
        w_ptr = weight_ptr + tl.where(third, weight2, tl.where(second, weight1, 0))
        b_ptr = bias_ptr
        if BIAS:
            b_ptr = bias_ptr + tl.where(third, bias2, tl.where(second, bias1, 0))
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < rows
    cols = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + row.to(tl.int64)[:, None] * K + cols[None, :]
    mask = inside[:, None] & (cols < K)[None, :]
    w = tl.load(w_rows, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        u = tl.load(w_rows + weight1, mask=mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if NORM:
        all_cols = tl.arange(0, PADDED_K)
        valid = all_cols < K
        x = tl.load(x_ptr + all_cols, mask=valid, other=0.0)
        if RESIDUAL:
            other = tl.load(residual_ptr + all_cols, mask=valid, other=0.0)
            x = (x.to(tl.float32) + other.to(tl.float32)).to(dtype)
            if pid == 0:
                tl.store(sum_ptr + all_cols, x, mask=valid)
        x32 = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x32 * x32, 0) / K + eps)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    gate = total
    for start in tl.static_range(0, K, BLOCK_K):
        col = start + cols
        if start > 0:
            mask = inside[:, None] & (col < K)[None, :]
            w = tl.load(w_rows + start, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                u = tl.load(w_rows + weight1 + start, mask=mask, other=0.0, eviction_policy="evict_first")
        valid = col < K
        x = tl.load(x_ptr + col, mask=valid, other=0.0)
        if NORM:
            if RESIDUAL:
                other = tl.load(residual_ptr + col, mask=valid, other=0.0)
                x = (x.to(tl.float32) + other.to(tl.float32)).to(dtype)
            by = tl.load(norm_ptr + col, mask=valid, other=0.0)
            x = (x.to(tl.float32) * scale).to(dtype)
            x = (x.to(tl.float32) * by.to(tl.float32)).to(dtype)
        factor = x.to(tl.float32)[None, :]
        total += w.to(tl.float32) * factor
        if GATED:
            gate += u.to(tl.float32) * factor
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(b_ptr + row, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(gate, 1)
        if BIAS:
            up += tl.load(b_ptr + bias1 + row, mask=inside, other=0.0).to(tl.float32)
        result = result.to(dtype).to(tl.float32)
        result = (result / (1 + tl.exp(-result))).to(dtype).to(tl.float32)
        result *= up.to(dtype).to(tl.float32)
    tl.store(out_ptr + first + row, result.to(dtype), mask=inside)


def blocks(rows: int, features: int, gated: bool, itemsize: int) -> tuple[int, int, int]:
    """(rows, features, warps) of a program, as measured fastest on an H200 for layers of 0.5 to 500 MB."""
    padded, wide = triton.next_power_of_2(features), 8192 // itemsize
    max_rows = max(1, 8 * wide // padded)  # everything a program loads must fit into its registers
    if rows < 8 * 132:  # few programs per multiprocessor
        return min(4, max_rows), min(padded, wide), 8
    if max_rows <= 2 or (gated and rows >= 8192):
        return min(2, max_rows), min(padded, wide // 2 if max_rows <= 2 else wide), 4
    block_k = min(padded, wide // 4)
    return min(16, max_rows, 2 * wide // block_k), block_k, 4


def _offset(first: torch.Tensor, other: torch.Tensor) -> int:
    """The offset of a tensor from the first one in memory, in elements."""
    return (other.data_ptr() - first.data_ptr()) // first.element_size()


def launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    gated: bool,
    total: torch.Tensor | None,
    sizes: tuple[int, int, int] | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Run the kernel; ``total`` receives the sum of ``x`` and ``residual``."""
    first, features = weights[0], weights[0].shape[1]
    rows = [w.shape[0] for w in weights]
    out = x.new_empty((*x.shape[:-1], rows[0] if gated else sum(rows)))
    block_n, block_k, warps = sizes or blocks(rows[0] if gated else sum(rows), features, gated, x.element_size())
    rows += [0] * (MAX_WEIGHTS - len(rows))
    offsets = [_offset(first, w) for w in weights] + [0] * (MAX_WEIGHTS - len(weights))
    bias_offsets = [_offset(biases[0], b) for b in biases] + [0] * (MAX_WEIGHTS - len(biases))
    tiles = triton.cdiv(rows[0], block_n) if gated else sum(triton.cdiv(n, block_n) for n in rows)
    gemv_kernel[(tiles,)](
        x,
        x if residual is None else residual,
        x if norm is None else norm,
        out if total is None else total,
        first,
        biases[0] if biases else x,
        out,
        eps,
        *rows,
        offsets[1],
        offsets[2],
        bias_offsets[1],
        bias_offsets[2],
        K=features,
        PADDED_K=triton.next_power_of_2(features),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        RESIDUAL=residual is not None,
        NORM=norm is not None,
        BIAS=bool(biases),
        GATED=gated,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out


@torch.library.custom_op("paraxis::gemv", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def gemv(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], gated: bool) -> torch.Tensor:
    """The results of linear layers on one row, concatenated; gated: ``silu(first) * second``."""
    return launch(x.contiguous(), None, None, 0.0, weights, biases, gated, None)


@gemv.register_fake
def _(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], gated: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weights[0].shape[0] if gated else sum(w.shape[0] for w in weights)))


@torch.library.custom_op("paraxis::rmsnorm_gemv", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def rmsnorm_gemv(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on the RMSNorm of ``x + residual``, and that sum (empty without a residual)."""
    x = x.contiguous()
    total = x.new_empty(0 if residual is None else x.shape)
    residual = None if residual is None else residual.contiguous()
    return launch(x, residual, norm, eps, weights, biases, gated, total), total


@rmsnorm_gemv.register_fake
def _(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = weights[0].shape[0] if gated else sum(w.shape[0] for w in weights)
    return x.new_empty((*x.shape[:-1], size)), x.new_empty(0 if residual is None else x.shape)
