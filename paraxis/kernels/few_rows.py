"""Products of a few rows with a weight, on a CPU: all that decoding does, apart from attention.

They take as long as reading the weights does. The library that torch uses for them (MKL) is Intel's, and on processors
of AMD reads at two thirds of what a core can: it goes through a weight from one end to the other. See ``few_rows.cpp``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .native import call_of, kernel, watched

MOST = 4
"""Rows; with more of them a product is arithmetic rather than reading."""
LEAST = 1 << 13
"""Numbers of a weight; for smaller ones a call is what takes time."""

_Call = call_of("rows weight bias out", "threads count inputs outputs row_stride weight_stride across")
_PLAIN = (torch.Tensor, nn.Parameter)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear``, by our kernel if it is one that it is made for: a few rows, with nobody looking on."""
    if x.is_cpu and not watched() and x.dim() > 0 and 0 < x.numel() <= MOST * weight.shape[-1]:
        result = _multiplied(x, weight, bias)
        if result is not None:
            return result
    return F.linear(x, weight, bias)


def pays(count: int, across: bool) -> bool:
    """Whether the kernel is faster than torch. Not found out by measuring: ranks of a machine compute the same.

    On a Xeon (Sapphire Rapids) a single row takes 5 to 20 % longer than with MKL, four rows two thirds of the time
    where each output has its weights together.
    """
    return _maker() == "AuthenticAMD" or (_maker() == "GenuineIntel" and count > 2 and not across)


@cache
def _maker() -> str:
    """Who made the processor; empty where that cannot be told, or is nobody that the kernel was tried with."""
    try:
        shown = Path("/proc/cpuinfo").read_text()[:4096]
    except OSError:
        return ""
    return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in shown), "")


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
    result = _multiplied(rows, weight.t(), None) if 0 < rows.shape[0] <= MOST and not watched() else None
    if result is None:
        torch.mm(rows, weight, out=out)
    else:
        out.copy_(result)


def _multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """``x @ weight.T + bias``; None if it is not for the kernel."""
    if not (_is_plain(x) and _is_plain(weight) and (bias is None or _is_plain(bias))):
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
    function = kernel("few_rows") if 0 < count <= MOST and pays(count, across) else None
    if function is None:
        return None
    rows = x if x.is_contiguous() else x.contiguous()
    out = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32, device="cpu")
    given = (rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    sizes = (torch.get_num_threads(), count, inputs, outputs, inputs, weight.stride(1 if across else 0), across)
    function(ctypes.byref(_Call(*given, *sizes)))
    return out


def _is_plain(x: torch.Tensor) -> bool:
    """Whether numbers lie in memory as a tensor says, in float32."""
    if type(x) not in _PLAIN or x.dtype != torch.float32 or not x.is_cpu:
        return False
    return x.layout is torch.strided and not x.is_neg()


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
    return kernel("few_rows") is not None


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
