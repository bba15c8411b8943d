"""GEMV for experts with quantized weights: each row reads the packed bytes of its own expert once, on a GPU."""

from __future__ import annotations

import torch
import triton

from ..quantized.encoding import Encoding, Parts
from ..quantized.gemv import fits as is_kernel_weight
from . import quantized_gemv_kernel as kernels
from .quantized_gemv import _E8M0, _KINDS, INTERPRETED, _table, sizes
from .quantized_gemv_kernel import quantized_gemv_kernel

MAX_ROWS = 64
"""Rows of all experts. With more of them, a GEMM with dequantized weights takes less time."""


def fits(x: torch.Tensor, parts: Parts, encoding: Encoding) -> bool:
    """Whether the kernel takes these rows, and this stack of weights ``[experts, out, in]``."""
    if x.shape[0] > MAX_ROWS or parts.codes.dim() != 3 or parts.rows is not None or parts.columns is not None:
        return False
    if not all(part.is_contiguous() for _, part in parts.present()):
        return False
    codes, scales, zeros, _, _, factor = parts
    one = Parts(
        codes[0],
        scales[0],
        None if zeros is None else zeros[0],
        factor=None if factor is None else factor[0],
    )
    return is_kernel_weight(one, encoding, x.shape[1])


def launch(x: torch.Tensor, parts: Parts, encoding: Encoding, ends: torch.Tensor) -> torch.Tensor:
    """``x[rows of e] @ weights[e].T`` for every expert ``e``, whose rows end at ``ends[e]``; other rows are zero."""
    features, (experts, rows, _) = x.shape[1], parts.codes.shape
    out = x.new_empty((x.shape[0], rows))
    kind, offset = _KINDS.get(encoding.table, (kernels.TABLE, 0.0))
    late = parts.scales.shape[-1] == 1
    width = min(128, triton.next_power_of_2(features)) if late else encoding.block[1]
    packed, per_word, vector = (2, 8, 4) if encoding.packed else (1, 1, 16)
    tile = sizes(rows, features // packed, width // packed, False)
    scales = parts.scales.view(torch.uint8) if parts.scales.dtype == _E8M0 else parts.scales
    codes = parts.codes.view(torch.int32) if encoding.packed else parts.codes
    quantized_gemv_kernel[(triton.cdiv(rows, tile.rows), x.shape[0])](
        x,
        x,
        x,
        ends,
        codes,
        scales,
        x if parts.zeros is None else parts.zeros,
        x,
        x if parts.factor is None else parts.factor,
        x,
        _table(encoding.table, x.device) if kind == kernels.TABLE else x,
        out,
        0.0,
        rows,
        *[0] * 14,
        K=features,
        PADDED_K=triton.next_power_of_2(features),
        GROUPS=scales.shape[2],
        GROUP_ROWS=0 if scales.shape[1] == 1 else encoding.block[0],
        LATE=late,
        BLOCK_N=tile.rows,
        BLOCK_G=tile.groups,
        CHUNKS=width // per_word // vector,
        VECTOR=vector,
        KIND=kind,
        OFFSET=offset,
        EXPONENTS=encoding.exponents or parts.scales.dtype == _E8M0,
        ZEROS=parts.zeros is not None,
        INDEX=False,
        FACTOR=0 if parts.factor is None else 1 if parts.factor.shape[1] > 1 else 2,
        ROUNDED=False,
        RESIDUAL=False,
        NORM=False,
        BIAS=False,
        GATED=False,
        ASM=not INTERPRETED,
        PDL=False,
        EXPERTS=experts,
        PADDED_EXPERTS=triton.next_power_of_2(experts),
        SCALE_ROWS=scales.shape[1],
        num_warps=tile.warps,
    )
    return out
