"""Linear layers with a quantized weight: it is dequantized tile by tile, never all of it at once.

As operators (``paraxis::quantized_linear``, ...) they are single nodes for compilers.
"""

from __future__ import annotations

import torch

from .dequantize import dequantize
from .encoding import Encoding, Parts, encoding_of

TILE_BYTES = 1 << 20
"""The size of a dequantized tile: it stays in the processor's cache until the matmul has read it."""


def tile_rows(inputs: int, rows: int, encoding: Encoding) -> int:
    """The rows of a tile: a multiple of the rows that have one scale, so that a tile has blocks of its own."""
    block = encoding.block[0] if encoding.block[0] < rows else 1
    count = max(TILE_BYTES // max(inputs * 4, 1), 1)
    return max(count // block, 1) * block


def rows_of(parts: Parts, encoding: Encoding, start: int, stop: int) -> Parts:
    """The parts of some rows of a weight; ``start`` is a multiple of the rows that have one scale."""
    block = encoding.block[0]

    def blocks(tensor: torch.Tensor) -> torch.Tensor:
        if parts.rows is not None or tensor.shape[-2] == 1:  # an index says which, or one block has all rows
            return tensor
        return tensor[..., start // block : -(-stop // block), :]

    return Parts(
        parts.codes[..., start:stop, :],
        blocks(parts.scales),
        None if parts.zeros is None else blocks(parts.zeros),
        None if parts.rows is None else parts.rows[start:stop],
        parts.columns,
        None if parts.factor is None else parts.factor[..., start:stop, :],
    )


def quantized_linear(
    x: torch.Tensor, parts: Parts, encoding: Encoding, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias``: the weight ``[out, in]`` is dequantized in the dtype of ``x``."""
    outputs, inputs = parts.codes.shape[-2], x.shape[-1]
    rows = x.reshape(-1, inputs)
    result = x.new_empty((rows.shape[0], outputs))
    step = tile_rows(inputs, outputs, encoding)
    for start in range(0, outputs, step):
        stop = min(start + step, outputs)
        weight = dequantize(rows_of(parts, encoding, start, stop), encoding, inputs, x.dtype)
        torch.mm(rows, weight.t(), out=result[:, start:stop])
    if bias is not None:
        result += bias
    return result.view(*x.shape[:-1], outputs)


def quantized_mm(x: torch.Tensor, parts: Parts, encoding: Encoding, inputs: int) -> torch.Tensor:
    """``x @ weight`` with a weight ``[out, in]``: what the backward pass of a linear layer needs."""
    outputs = parts.codes.shape[-2]
    rows = x.reshape(-1, outputs)
    result = x.new_zeros((rows.shape[0], inputs))
    step = tile_rows(inputs, outputs, encoding)
    for start in range(0, outputs, step):
        stop = min(start + step, outputs)
        weight = dequantize(rows_of(parts, encoding, start, stop), encoding, inputs, x.dtype)
        result.addmm_(rows[:, start:stop], weight)
    return result.view(*x.shape[:-1], inputs)


def expert_of(parts: Parts, expert: int) -> Parts:
    """The parts of one weight of a stack."""
    codes, scales, zeros, rows, columns, factor = parts
    return Parts(
        codes[expert],
        scales[expert],
        None if zeros is None else zeros[expert],
        rows,
        columns,
        None if factor is None else factor[expert],
    )


def quantized_grouped_mm(
    x: torch.Tensor, parts: Parts, encoding: Encoding, ends: torch.Tensor, inputs: int, transposed: bool
) -> torch.Tensor:
    """``x[rows of e] @ weights[e]`` for every expert ``e``, whose rows end at ``ends[e]``.

    ``transposed``: the product is with ``weights[e].T``, as that of a linear layer is.
    """
    outputs = parts.codes.shape[-2] if transposed else inputs
    result = x.new_zeros((x.shape[0], outputs))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if start < end:
            weight = expert_of(parts, expert)
            product = (
                quantized_linear(x[start:end], weight, encoding)
                if transposed
                else quantized_mm(x[start:end], weight, encoding, inputs)
            )
            result[start:end] = product
            start = end
    return result


# -- as operators --------------------------------------------------------------------------------------------------

_PARTS = "Tensor codes, Tensor scales, Tensor? zeros, Tensor? rows, Tensor? columns, Tensor? factor, str encoding"
_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define(f"dequantize({_PARTS}, SymInt inputs, ScalarType dtype) -> Tensor")
_library.define(f"quantized_linear(Tensor x, {_PARTS}, Tensor? bias) -> Tensor")
_library.define(f"quantized_mm(Tensor x, {_PARTS}, SymInt inputs) -> Tensor")
_library.define(f"quantized_grouped_mm(Tensor x, {_PARTS}, Tensor ends, SymInt inputs, bool transposed) -> Tensor")

_T = torch.Tensor
_O = torch.Tensor | None


def _dequantize(c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, inputs: int, dtype: torch.dtype) -> _T:
    return dequantize(Parts(c, s, z, r, k, f), encoding_of(encoding), inputs, dtype)


def _linear(x: _T, c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, bias: _O) -> _T:
    return quantized_linear(x, Parts(c, s, z, r, k, f), encoding_of(encoding), bias)


def _mm(x: _T, c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, inputs: int) -> _T:
    return quantized_mm(x, Parts(c, s, z, r, k, f), encoding_of(encoding), inputs)


def _grouped_mm(
    x: _T, c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, ends: _T, inputs: int, transposed: bool
) -> _T:
    return quantized_grouped_mm(x, Parts(c, s, z, r, k, f), encoding_of(encoding), ends, inputs, transposed)


def _dequantize_fake(c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, inputs: int, dtype: torch.dtype) -> _T:
    return c.new_empty((*c.shape[:-1], inputs), dtype=dtype)


def _linear_fake(x: _T, c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, bias: _O) -> _T:
    return x.new_empty((*x.shape[:-1], c.shape[-2]))


def _mm_fake(x: _T, c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, inputs: int) -> _T:
    return x.new_empty((*x.shape[:-1], inputs))


def _grouped_mm_fake(
    x: _T, c: _T, s: _T, z: _O, r: _O, k: _O, f: _O, encoding: str, ends: _T, inputs: int, transposed: bool
) -> _T:
    return x.new_empty((x.shape[0], c.shape[-2] if transposed else inputs))


for _name, _function, _fake in (
    ("dequantize", _dequantize, _dequantize_fake),
    ("quantized_linear", _linear, _linear_fake),
    ("quantized_mm", _mm, _mm_fake),
    ("quantized_grouped_mm", _grouped_mm, _grouped_mm_fake),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"paraxis::{_name}", _fake, lib=_library)
