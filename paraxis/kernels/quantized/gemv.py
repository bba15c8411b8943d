"""GEMV with quantized weights as operators: linear layers on one row, with what is right before and after them.

Here are the operators that they stand for; on a GPU each is one Triton kernel
(:mod:`paraxis.kernels.triton.quantized_operators`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .encoding import Encoding, Parts, encoding_of
from .linear import quantized_linear

MAX_WEIGHTS = 3
"""Weights per kernel: query, key and value."""
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)


def fits(parts: Parts, encoding: Encoding, inputs: int) -> bool:
    """Whether the kernel takes a weight ``[out, in]``, from the shapes of its parts."""
    codes, scales = parts.codes, parts.scales
    if codes.dim() != 2 or parts.columns is not None or not isinstance(inputs, int) or codes.shape[0] == 0:
        return False
    if inputs % 16 or codes.dtype not in CODES or scales.dtype not in SCALES:
        return False
    group = encoding.block[1]
    if scales.shape[1] > 1 and (group & (group - 1) or not 16 <= group <= 1024):
        return False
    if encoding.packed and scales.shape[1] > 1 and group < 32:
        return False
    if parts.zeros is not None and parts.zeros.shape != scales.shape:
        return False
    if parts.factor is not None and (parts.factor.dtype != torch.float32 or parts.factor.shape[1] != 1):
        return False
    return all(part.is_contiguous() for _, part in parts.present())


def gemv(
    x: torch.Tensor, weights: Sequence[Parts], encoding: Encoding, biases: Sequence[torch.Tensor], gated: bool
) -> torch.Tensor:
    """The results of linear layers on one row, concatenated; gated: ``silu(first) * second``."""
    results = [quantized_linear(x, w, encoding, biases[i] if biases else None) for i, w in enumerate(weights)]
    return F.silu(results[0]) * results[1] if gated else torch.cat(results, -1)


def rmsnorm_gemv(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weights: Sequence[Parts],
    encoding: Encoding,
    biases: Sequence[torch.Tensor],
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on the RMSNorm of ``x + residual``, and that sum (empty without a residual)."""
    total = x.new_empty(0 if residual is None else x.shape)
    row = x if residual is None else torch.add(x, residual, out=total)
    wide = row.to(torch.float32)
    row = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return gemv(row, weights, encoding, biases, gated), total


# -- as operators --------------------------------------------------------------------------------------------------

_T = torch.Tensor
_S = Sequence[torch.Tensor]
_WEIGHTS = "Tensor[] codes, Tensor[] scales, Tensor[] zeros, Tensor[] rows, Tensor[] factors, str encoding"
_library = torch.library.Library("paraxis", "FRAGMENT")
_tags = (torch.Tag.flexible_layout,)
_library.define(f"quantized_gemv(Tensor x, {_WEIGHTS}, Tensor[] biases, bool gated) -> Tensor", tags=_tags)
_library.define(
    f"rmsnorm_quantized_gemv(Tensor x, Tensor? residual, Tensor norm, float eps, {_WEIGHTS}, Tensor[] biases, "
    "bool gated) -> (Tensor, Tensor)",
    tags=_tags,
)


def parts_of(codes: _S, scales: _S, zeros: _S, rows: _S, factors: _S) -> list[Parts]:
    """The parts of each weight, from those of all weights; a list is empty where they have no such part."""
    optional = (zeros, rows, factors)
    found = []
    for i, pair in enumerate(zip(codes, scales, strict=True)):
        zero, row, factor = (tensors[i] if tensors else None for tensors in optional)
        found.append(Parts(*pair, zero, row, None, factor))
    return found


def _gemv(x: _T, c: _S, s: _S, z: _S, r: _S, f: _S, encoding: str, biases: _S, gated: bool) -> _T:
    return gemv(x, parts_of(c, s, z, r, f), encoding_of(encoding), biases, gated)


def _rmsnorm_gemv(
    x: _T,
    residual: _T | None,
    norm: _T,
    eps: float,
    c: _S,
    s: _S,
    z: _S,
    r: _S,
    f: _S,
    encoding: str,
    biases: _S,
    gated: bool,
) -> tuple[_T, _T]:
    weights = parts_of(c, s, z, r, f)
    return rmsnorm_gemv(x, residual, norm, eps, weights, encoding_of(encoding), biases, gated)


def _gemv_fake(x: _T, c: _S, s: _S, z: _S, r: _S, f: _S, encoding: str, biases: _S, gated: bool) -> _T:
    return x.new_empty((*x.shape[:-1], c[0].shape[0] if gated else sum(codes.shape[0] for codes in c)))


def _rmsnorm_gemv_fake(
    x: _T,
    residual: _T | None,
    norm: _T,
    eps: float,
    c: _S,
    s: _S,
    z: _S,
    r: _S,
    f: _S,
    encoding: str,
    biases: _S,
    gated: bool,
) -> tuple[_T, _T]:
    total = x.new_empty(0 if residual is None else x.shape)
    return _gemv_fake(x, c, s, z, r, f, encoding, biases, gated), total


_library.impl("quantized_gemv", _gemv, "CompositeExplicitAutograd")
_library.impl("rmsnorm_quantized_gemv", _rmsnorm_gemv, "CompositeExplicitAutograd")
torch.library.register_fake("paraxis::quantized_gemv", _gemv_fake, lib=_library)
torch.library.register_fake("paraxis::rmsnorm_quantized_gemv", _rmsnorm_gemv_fake, lib=_library)
