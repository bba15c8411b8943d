"""Skinny GEMM on a GPU: the linear layers of a batched decode step, which read their weights once.

Up to :data:`MAX_ROWS` rows, such a layer takes the time to read its weights. torch's kernels need the weights of query,
key and value one after the other, each too small to fill the device, and write gate and up before they are multiplied.
Here one kernel computes layers on the same rows, with the gate after them. Where there are few features, the sum over
the inputs is divided among programs (split-K), and a second kernel adds their terms, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...compat.triton import gdc_launch_dependents, gdc_wait
from .shared_memory import shared_memory

MAX_WEIGHTS = 3
"""Weights per kernel: query, key and value."""
MAX_ROWS = 64
"""Beyond that, arithmetic counts, and torch's kernels are as fast."""


@triton.jit
def _silu_gate(gate, up, dtype: tl.constexpr):
    """``silu(gate) * up`` with the rounding of separate operators."""
    gate = gate.to(dtype).to(tl.float32)
    gate = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return gate * up.to(dtype).to(tl.float32)


@triton.jit
def skinny_gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    count,
    features,
    rows0,
    rows1,
    rows2,
    weight1,
    weight2,
    bias1,
    bias2,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, split): ``BLOCK_N`` rows of one of the weights (gated: of both) and ``PART`` of its columns.

    It multiplies them by all ``count`` rows of ``x``.
    ``weight1`` and ``weight2`` are the offsets of the other weights from the first one in memory.
    """
    dtype = x_ptr.dtype.element_ty
    pid, split = tl.program_id(0), tl.program_id(1)
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
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside, used = n < rows, m < count
    w_rows = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    x_columns = x_ptr + m[None, :] * K + k[:, None]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    other = acc
    begin = split * PART
    for start in tl.range(begin, tl.minimum(begin + PART, K), BLOCK_K, num_stages=STAGES):
        left = k < K - start
        mask = inside[:, None] & left[None, :]
        w = tl.load(w_rows + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_columns + start, mask=left[:, None] & used[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            u = tl.load(w_rows + weight1 + start, mask=mask, other=0.0, eviction_policy="evict_first")
            other = tl.dot(u, x, other, input_precision="ieee")
    if SPLITS == 1:
        if BIAS:
            acc += tl.load(b_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                other += tl.load(b_ptr + bias1 + n, mask=inside, other=0.0).to(tl.float32)[:, None]
            acc = _silu_gate(acc, other, dtype)
        at = out_ptr + m[None, :].to(tl.int64) * features + (first + n)[:, None]
        tl.store(at, acc.to(dtype), mask=inside[:, None] & used[None, :])
    else:
        at = partial_ptr + (split * features + first + n)[:, None] * BLOCK_M + m[None, :]
        tl.store(at, acc, mask=inside[:, None])
        if GATED:
            tl.store(at + SPLITS * features * BLOCK_M, other, mask=inside[:, None])


@triton.jit
def add_terms_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    count,
    features,
    rows0,
    rows1,
    bias1,
    bias2,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile): the sum of the terms of ``BLOCK_N`` features, with the bias and the gate."""
    dtype = out_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    inside = n < features
    at = n[:, None] * BLOCK_M + m[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(partial_ptr + split * features * BLOCK_M + at, mask=inside[:, None], other=0.0)
    if BIAS:
        offset = tl.where(n >= rows0 + rows1, bias2 - rows0 - rows1, tl.where(n >= rows0, bias1 - rows0, 0))
        acc += tl.load(bias_ptr + offset + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        other = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for split in tl.static_range(SPLITS):
            from_here = partial_ptr + (SPLITS + split) * features * BLOCK_M
            other += tl.load(from_here + at, mask=inside[:, None], other=0.0)
        if BIAS:
            other += tl.load(bias_ptr + bias1 + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        acc = _silu_gate(acc, other, dtype)
    to = out_ptr + m[None, :].to(tl.int64) * features + n[:, None]
    tl.store(to, acc.to(dtype), mask=inside[:, None] & (m < count)[None, :])


class Tiles(NamedTuple):
    """How a layer is divided among programs."""

    block_n: int
    block_k: int
    splits: int
    stages: int
    warps: int


def tiles(features: int, inputs: int, rows: int, gated: bool, itemsize: int, shared_memory: int) -> Tiles:
    """As measured fastest on an H200 for 8 to 64 rows and layers of 34 MB to 1 GB.

    Args:
        features: Of all weights; gated: of each of the two.
        inputs: The columns of a weight.
        rows: The rows, as many as a tile has.
        gated: Whether the kernel multiplies by two weights.
        itemsize: The bytes of an element.
        shared_memory: What a program may use.
    """
    block_n, block_k = 64, 128
    stage = block_k * itemsize * (rows + block_n * (2 if gated else 1))
    stages = max(1, min(4, shared_memory // stage))
    programs, splits = -(-features // block_n), 1
    while not gated and programs * splits < 96 and splits < 4 and inputs >= 1024 * splits:
        splits *= 2
    return Tiles(block_n, block_k, splits, stages, 4)


def _offset(first: torch.Tensor, other: torch.Tensor) -> int:
    """The offset of a tensor from the first one in memory, in elements."""
    return (other.data_ptr() - first.data_ptr()) // first.element_size()


def launch(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    gated: bool,
    sizes: Tiles | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Run the kernels."""
    first, inputs = weights[0], weights[0].shape[1]
    count = x.numel() // inputs
    rows = [w.shape[0] for w in weights]
    features = rows[0] if gated else sum(rows)
    out = x.new_empty((*x.shape[:-1], features))
    block_m = max(16, triton.next_power_of_2(count))
    block_n, block_k, splits, stages, warps = sizes or tiles(
        features, inputs, block_m, gated, x.element_size(), shared_memory(x.device)
    )
    part = triton.cdiv(triton.cdiv(inputs, splits), block_k) * block_k
    rows += [0] * (MAX_WEIGHTS - len(rows))
    offsets = [_offset(first, w) for w in weights] + [0] * (MAX_WEIGHTS - len(weights))
    bias_offsets = [_offset(biases[0], b) for b in biases] + [0] * (MAX_WEIGHTS - len(biases))
    partials = (
        x.new_empty(splits * features * block_m * (2 if gated else 1), dtype=torch.float32) if splits > 1 else out
    )
    count_tiles = triton.cdiv(rows[0], block_n) if gated else sum(triton.cdiv(n, block_n) for n in rows)
    skinny_gemm_kernel[(count_tiles, splits)](
        x,
        first,
        biases[0] if biases else x,
        out,
        partials,
        count,
        features,
        *rows,
        offsets[1],
        offsets[2],
        bias_offsets[1],
        bias_offsets[2],
        K=inputs,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PART=part,
        STAGES=stages,
        BIAS=bool(biases),
        GATED=gated,
        SPLITS=splits,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    if splits > 1:
        block = max(1, 1024 // block_m)
        add_terms_kernel[(triton.cdiv(features, block),)](
            partials,
            biases[0] if biases else x,
            out,
            count,
            features,
            rows[0],
            rows[1],
            bias_offsets[1],
            bias_offsets[2],
            BLOCK_M=block_m,
            BLOCK_N=block,
            BIAS=bool(biases),
            GATED=gated,
            SPLITS=splits,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return out


@torch.library.custom_op("paraxis::skinny_gemm", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def skinny_gemm(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], gated: bool
) -> torch.Tensor:
    """The results of linear layers on the same rows, concatenated; gated: ``silu(first) * second``."""
    return launch(x.contiguous(), weights, biases, gated)


@skinny_gemm.register_fake
def _(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], gated: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weights[0].shape[0] if gated else sum(w.shape[0] for w in weights)))
