"""Linear layers in float8 on both sides: the input is rounded to float8 by groups of columns, with a scale each.

That is what checkpoints in float8 with dynamic scales are made for, and what transformers computes on a GPU. The GEMM
is torch's, which multiplies by both scales per block of 128; it exists for some GPUs, and is tried on a small matrix.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..quantized.encoding import Encoding, Parts

BLOCK = 128
"""Columns with one scale, and rows of a weight."""
PADDING = 16
"""The GEMM takes multiples of so many rows."""
BLOCK_M, BLOCK_G = 4, 8


@triton.jit
def round_rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    padded,
    groups,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program (groups, rows): float8 codes, and scales whose rows are contiguous; rows of padding are zero."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * BLOCK_G * WIDTH + tl.arange(0, BLOCK_G * WIDTH)
    group = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    width = groups * WIDTH
    there = (row < padded)[:, None] & (col < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + col[None, :]
    x = tl.load(x_ptr + at, mask=there & (row < rows)[:, None], other=0.0).to(tl.float32)
    x = x.reshape(BLOCK_M, BLOCK_G, WIDTH)
    largest = tl.max(tl.abs(x), 2)
    scale = tl.where(largest > 0, largest / 448.0, 1.0)
    codes = (x / scale[:, :, None]).to(tl.float8e4nv).reshape(BLOCK_M, BLOCK_G * WIDTH)
    tl.store(codes_ptr + at, codes, mask=there)
    inside = (row < padded)[:, None] & (group < groups)[None, :]
    tl.store(scales_ptr + group[None, :].to(tl.int64) * padded + row[:, None], scale, mask=inside)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a contiguous matrix whose columns are a multiple of 128; padded to a multiple of 16 rows."""
    rows, columns = x.shape
    padded, groups = -(-rows // PADDING) * PADDING, columns // BLOCK
    codes = torch.empty((padded, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((groups, padded), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(groups, BLOCK_G), triton.cdiv(padded, BLOCK_M))
    round_rows_kernel[grid](
        x, codes, scales, rows, padded, groups, BLOCK_M=BLOCK_M, BLOCK_G=BLOCK_G, WIDTH=BLOCK, num_warps=4
    )
    return codes, scales.t()


def fits(x: torch.Tensor, parts: Parts, encoding: Encoding) -> bool:
    """Whether an input is rounded to float8 for this weight, and torch has a GEMM for both here."""
    return (
        encoding.activations == f"float8 {BLOCK}"
        and encoding.block == (BLOCK, BLOCK)
        and parts.codes.dtype == torch.float8_e4m3fn
        and parts.codes.dim() == 2
        and parts.scales.dtype == torch.float32
        and parts.rows is None
        and parts.columns is None
        and parts.codes.shape[0] % PADDING == 0
        and parts.codes.shape[1] % BLOCK == 0
        and x.dtype in (torch.bfloat16, torch.float32)
        and has_gemm(x.device)
    )


def scaled_linear(x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``, with ``x`` rounded to float8."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    result = _mm(*round_rows(rows), parts, x.dtype)[: rows.shape[0]]
    if bias is not None:
        result = result + bias
    return result.view(*x.shape[:-1], parts.codes.shape[0])


def _mm(codes: torch.Tensor, scales: torch.Tensor, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    by = parts.scales
    missing = -by.shape[1] % 4  # rows of scales are read at multiples of 16 bytes
    if missing:
        by = F.pad(by, (0, missing))
    kind = F.ScalingType
    return F.scaled_mm(
        codes, parts.codes.t(), scales, kind.BlockWise1x128, by.t(), kind.BlockWise128x128, output_dtype=dtype
    )


@lru_cache(maxsize=16)
def has_gemm(device: torch.device) -> bool:
    """Whether torch's GEMM for scales per block exists on a device, and computes what it should."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(48, 384, device=device, generator=generator)
    weight = torch.randn(256, 384, device=device, generator=generator).to(torch.float8_e4m3fn)
    by = torch.rand(2, 3, device=device, generator=generator) + 0.5
    codes, scales = round_rows(x)
    wide = weight.float() * by.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    exact = (codes.float() * scales.repeat_interleave(BLOCK, 1)).double() @ wide.double().T
    try:
        found = _mm(codes, scales, Parts(weight, by), torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError, AttributeError):
        return False
    return bool((found.double() - exact).norm() < 1e-2 * exact.norm())
