"""Products of a few rows with a weight, on a CPU: all that decoding does, apart from attention.

They take as long as reading the weights does. The library that torch uses for them (MKL) is Intel's, and on processors
of AMD reads at two thirds of what a core can: it goes through a weight from one end to the other. See ``few_rows.cpp``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F

from . import gemm_onednn as many_rows
from .build import call_of, is_plain, kernel, maker, watched

MOST = 4
"""Rows; with more of them a product is arithmetic rather than reading."""
LEAST = 1 << 13
"""Numbers of a weight; for smaller ones a call is what takes time."""

_Call = call_of("rows weight bias out", "threads count inputs outputs row_stride weight_stride across")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear``, with nobody looking on by what is fastest: our kernel for a few rows, oneDNN's for many."""
    if x.is_cpu and not watched() and x.dim() > 0 and x.numel() > 0:
        by = _multiplied if x.numel() <= MOST * weight.shape[-1] else many_rows.multiplied
        result = by(x, weight, bias)
        if result is not None:
            return result
    return F.linear(x, weight, bias)


def pays(count: int, across: bool) -> bool:
    """Whether the kernel is faster than torch. Not found out by measuring: ranks of a machine compute the same.

    On a Xeon (Sapphire Rapids) a single row takes 5 to 20 % longer than with MKL, four rows two thirds of the time
    where each output has its weights together.
    """
    return maker() == "AuthenticAMD" or (maker() == "GenuineIntel" and count > 2 and not across)


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``rows[start:end] @ weights[e]`` for the rows of every expert ``e``, which end where ``ends`` says."""
    result = rows.new_empty((rows.shape[0], weights.shape[2]))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if start < end:
            multiply(rows[start:end], weights[expert], result[start:end])
            start = end
    result[start:].zero_()  # rows of no expert
    return result


def multiply(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """``torch.mm(rows, weight, out=out)``"""
    result = None
    if rows.shape[0] > 0 and not watched():
        by = _multiplied if rows.shape[0] <= MOST else many_rows.multiplied
        result = by(rows, weight.t(), None)
    if result is None:
        torch.mm(rows, weight, out=out)
    else:
        out.copy_(result)


def _multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """``x @ weight.T + bias``; None if it is not for the kernel."""
    if not (is_plain(x) and is_plain(weight) and (bias is None or is_plain(bias))):
        return None
    if weight.dim() != 2 or weight.numel() < LEAST:
        return None
    outputs, inputs = weight.shape
    across = weight.stride(1) != 1
    if (across and weight.stride(0) != 1) or x.shape[-1] != inputs or not inputs:
        return None
    if bias is not None and (bias.shape != (outputs,) or not bias.is_contiguous()):
        return None
    count = x.numel() // inputs
    function = kernel("gemv") if 0 < count <= MOST and pays(count, across) else None
    if function is None:
        return None
    rows = x if x.is_contiguous() else x.contiguous()
    out = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32, device="cpu")
    given = (rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    sizes = (torch.get_num_threads(), count, inputs, outputs, inputs, weight.stride(1 if across else 0), across)
    function(ctypes.byref(_Call(*given, *sizes)))
    return out


# -- as an operator ------------------------------------------------------------------------------------------------


def fits(x: Any, weight: Any) -> bool:
    """Whether the kernel is for ``x @ weight`` of tensors like these, which may be fake."""
    for tensor in (x, weight):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or tensor.dtype != torch.float32:
            return False
        if not tensor.is_cpu or not all(isinstance(n, int) for n in tensor.shape):
            return False
    if not 0 < x.shape[0] <= MOST or weight.numel() < LEAST or not pays(x.shape[0], weight.stride(1) == 1):
        return False
    return kernel("gemv") is not None


def _few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = _multiplied(x, weight, bias)
    return F.linear(x, weight, bias).contiguous() if result is None else result


def _grouped_like(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weights.shape[2]))


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define("few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("few_rows", _few_rows, "CPU")
torch.library.register_fake(
    "paraxis::few_rows", lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=_library
)
_library.define("grouped_rows(Tensor rows, Tensor weights, Tensor ends) -> Tensor")
_library.impl("grouped_rows", grouped, "CPU")
torch.library.register_fake("paraxis::grouped_rows", _grouped_like, lib=_library)
