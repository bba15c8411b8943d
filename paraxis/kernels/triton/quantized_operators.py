"""What the operators on quantized weights run on a GPU: the kernel for the number of rows.

Importing this module registers it; who puts a quantized weight on a GPU imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from ..quantized.encoding import Encoding, Parts, encoding_of
from ..quantized.gemv import fits, parts_of
from . import dequantize, grouped_gemv, quantized_gemv, scaled_linear

_T = torch.Tensor
_O = torch.Tensor | None
_S = Sequence[torch.Tensor]


def linear(x: torch.Tensor, parts: Parts, encoding: Encoding, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``: one row by the GEMV kernel, more by a GEMM in float8 or with a dequantized weight."""
    inputs = x.shape[-1]
    if prod(x.shape[:-1]) == 1 and fits(parts, encoding, inputs):
        biases = [] if bias is None else [bias.contiguous()]
        return quantized_gemv.launch(x.contiguous(), None, None, 0.0, [parts], encoding, biases, False, None)
    if scaled_linear.fits(x, parts, encoding):
        return scaled_linear.scaled_linear(x, parts, bias)
    return F.linear(x, dequantize.launch(parts, encoding, inputs, x.dtype), bias)


def grouped_mm(
    x: torch.Tensor, parts: Parts, encoding: Encoding, ends: torch.Tensor, inputs: int, transposed: bool
) -> torch.Tensor:
    """``x[rows of e] @ weights[e]`` for every expert ``e``: up to 64 rows read the weights of their experts alone."""
    if transposed and grouped_gemv.fits(x, parts, encoding):
        return grouped_gemv.launch(x.contiguous(), parts, encoding, ends)
    weights = dequantize.launch(parts, encoding, inputs, x.dtype)
    weights = weights.transpose(-1, -2) if transposed else weights
    if x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, weights, offs=ends.to(torch.int32))
    expert = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=ends.dtype), right=True)
    result = x.new_zeros((x.shape[0], weights.shape[-1]))
    for number in range(weights.shape[0]):  # no size depends on values: a CUDA graph may capture it
        result = torch.where((expert == number)[:, None], x @ weights[number], result)
    return result


def _dequantize(c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, inputs: int, dtype: torch.dtype) -> _T:
    return dequantize.launch(Parts(c, s, z, r, k, f), encoding_of(encoding), inputs, dtype)


def _linear(x: _T, c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, bias: _O) -> _T:
    return linear(x, Parts(c, s, z, r, k, f), encoding_of(encoding), bias)


def _mm(x: _T, c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, inputs: int) -> _T:
    return x @ dequantize.launch(Parts(c, s, z, r, k, f), encoding_of(encoding), inputs, x.dtype)


def _grouped_mm(
    x: _T, c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, ends: _T, inputs: int, transposed: bool
) -> _T:
    return grouped_mm(x, Parts(c, s, z, r, k, f), encoding_of(encoding), ends, inputs, transposed)


def _gemv(x: _T, c: _S, s: _S, z: _S, r: _S, f: _S, encoding: str, biases: _S, gated: bool) -> _T:
    weights = parts_of(c, s, z, r, f)
    return quantized_gemv.launch(x.contiguous(), None, None, 0.0, weights, encoding_of(encoding), biases, gated, None)


def _rmsnorm_gemv(
    x: _T,
    residual: _O,
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
    residual, weights = None if residual is None else residual.contiguous(), parts_of(c, s, z, r, f)
    result = quantized_gemv.launch(
        x.contiguous(), residual, norm, eps, weights, encoding_of(encoding), biases, gated, total
    )
    return result, total


_library = torch.library.Library("paraxis", "IMPL")
for _name, _function in (
    ("dequantize", _dequantize),
    ("quantized_linear", _linear),
    ("quantized_mm", _mm),
    ("quantized_grouped_mm", _grouped_mm),
    ("quantized_gemv", _gemv),
    ("rmsnorm_quantized_gemv", _rmsnorm_gemv),
):
    _library.impl(_name, _function, "CUDA")
