"""Dequantizing a weight on a GPU in one pass over it: for matmuls of many rows, which torch's GEMM then computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quantized.encoding import Encoding, Parts
from .quantized_gemv import _E8M0, _table
from .quantized_gemv_kernel import _scales

BLOCK_N, BLOCK_K = 8, 512


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    rows_ptr,
    columns_ptr,
    factor_ptr,
    table_ptr,
    out_ptr,
    n,
    k,
    row_bytes,
    groups,
    zero_row,
    zero_column,
    factor_row,
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (block of columns, block of rows): the values in the dtype of the result."""
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (row < n)[:, None] & (col < k)[None, :]
    wide = row.to(tl.int64)[:, None]
    if PACKED:
        byte = tl.program_id(0) * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        known = (row < n)[:, None] & (byte < row_bytes)[None, :]
        both = tl.load(codes_ptr + wide * row_bytes + byte[None, :], mask=known, other=0).to(tl.int32)
        codes = tl.join(both & 15, both >> 4).reshape(BLOCK_N, BLOCK_K)
        values = tl.load(table_ptr + codes)
    else:
        values = tl.load(codes_ptr + wide * k + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROWS:
        scale_row = tl.load(rows_ptr + row, mask=row < n, other=0)
    else:
        scale_row = row // GROUP_ROWS
    if COLUMNS:
        scale_col = tl.load(columns_ptr + col, mask=col < k, other=0)
    else:
        scale_col = col // GROUP
    if ZEROS:
        at = scale_row[:, None] * zero_row + scale_col[None, :] * zero_column
        values -= tl.load(zeros_ptr + at, mask=inside, other=0).to(tl.float32)
    scale = _scales(scales_ptr, scale_row[:, None] * groups + scale_col[None, :], inside, EXPONENTS)
    if FACTOR:
        scale *= tl.load(factor_ptr + row * factor_row, mask=row < n, other=0.0)[:, None]
    values *= scale
    if ROUNDING == 1:
        values = values.to(tl.bfloat16).to(tl.float32)
    elif ROUNDING == 2:
        values = values.to(tl.float16).to(tl.float32)
    tl.store(out_ptr + wide * k + col[None, :], values.to(out_ptr.dtype.element_ty), mask=inside)


_ROUNDING = {None: 0, torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def launch(parts: Parts, encoding: Encoding, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight ``[..., out, inputs]`` in a dtype."""
    if parts.codes.dim() > 2:
        stack, rows_each = parts.codes.shape[:-2], parts.codes.shape[-2]
        one = _one_matrix(parts, encoding)
        if one is not None:
            return launch(*one, inputs, dtype).view(*stack, rows_each, inputs)
        shared = (parts.rows, parts.columns)
        each = [None if t is None else t.flatten(0, -3) for t in (parts.codes, parts.scales, parts.zeros, parts.factor)]
        found = []
        for i in range(each[0].shape[0]):  # type: ignore[union-attr]
            codes, scales, zeros, factor = (None if t is None else t[i] for t in each)
            each_parts = Parts(codes, scales, zeros, *shared, factor)  # type: ignore[arg-type]
            found.append(launch(each_parts, encoding, inputs, dtype))
        return torch.stack(found).view(*stack, *found[0].shape)
    codes, scales, zeros, rows, columns, factor = (None if t is None else t.contiguous() for t in parts)
    assert codes is not None and scales is not None
    n = codes.shape[0]
    exponents = encoding.exponents or scales.dtype == _E8M0
    scales = scales.view(torch.uint8) if scales.dtype == _E8M0 else scales
    out = torch.empty((n, inputs), dtype=dtype, device=codes.device)
    zero = (0, 0) if zeros is None else [stride if size > 1 else 0 for size, stride in zip(zeros.shape, zeros.stride())]
    dequantize_kernel[(triton.cdiv(inputs, BLOCK_K), triton.cdiv(n, BLOCK_N))](
        codes,
        scales,
        scales if zeros is None else zeros,
        scales if rows is None else rows,
        scales if columns is None else columns,
        scales if factor is None else factor,
        _table(encoding.table, codes.device) if encoding.packed else scales,
        out,
        n,
        inputs,
        codes.shape[1],
        scales.shape[1],
        *zero,
        0 if factor is None or factor.shape[0] == 1 else 1,
        GROUP_ROWS=encoding.block[0] if rows is None and scales.shape[0] > 1 else 1 << 30,
        GROUP=encoding.block[1] if columns is None and scales.shape[1] > 1 else 1 << 30,
        PACKED=encoding.packed,
        EXPONENTS=exponents,
        ZEROS=zeros is not None,
        ROWS=rows is not None,
        COLUMNS=columns is not None,
        FACTOR=factor is not None,
        ROUNDING=_ROUNDING[encoding.rounding_dtype],
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
    )
    return out


def _one_matrix(parts: Parts, encoding: Encoding) -> tuple[Parts, Encoding] | None:
    """A stack of weights as one weight with the rows of all; None if scales do not follow rows."""
    codes, scales, zeros, rows, columns, factor = parts
    count = codes.shape[-2]
    block = encoding.block[0] if scales.shape[-2] > 1 else count
    if rows is not None or columns is not None or count % block or (zeros is not None and zeros.shape != scales.shape):
        return None
    if factor is not None:
        factor = factor.expand(*factor.shape[:-2], count, 1).reshape(-1, 1)
    flat = [None if t is None else t.reshape(-1, t.shape[-1]) for t in (codes, scales, zeros)]
    found = Parts(flat[0], flat[1], flat[2], None, None, factor)  # type: ignore[arg-type]
    return found, Encoding(**{**vars(encoding), "block": (block, encoding.block[1])})
