"""GEMV on a CPU: linear layers of one to four rows, which is all that a decode step does apart from attention.

They are bound by reading the weights. torch uses MKL for them, which is Intel's, and on AMD processors reads at two
thirds of a core's bandwidth: it reads a weight from one end to the other, as a single stream. See ``gemv.cpp``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ...compat.torch import linear as torch_linear
from ...compat.torch import must_use_aten
from . import gemm_onednn
from .build import call_struct, cpu_vendor, is_plain, load_kernel

MAX_ROWS = 4
"""With more rows a matmul is bound by arithmetic, not by reading the weight."""
MIN_WEIGHT_SIZE = 1 << 13
"""Elements of a weight; for smaller ones the call itself takes most of the time."""

_Call = call_struct("rows weight bias out", "threads count inputs outputs row_stride weight_stride column_major")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` with the fastest kernel: our GEMV up to ``MAX_ROWS``, oneDNN for many rows, else torch's own."""
    if x.is_cpu and not must_use_aten() and x.dim() > 0 and x.numel() > 0:
        matmul = _gemv if x.numel() <= MAX_ROWS * weight.shape[-1] else gemm_onednn.onednn_linear
        result = matmul(x, weight, bias)
        if result is not None:
            return result
    return torch_linear(x, weight, bias)


def is_faster(count: int, column_major: bool) -> bool:
    """Whether the kernel is faster than torch. By a rule, not by measuring: all ranks must choose the same kernel.

    On a Xeon (Sapphire Rapids) a single row takes 5 to 20 % longer than with MKL, four rows two thirds of the time
    where the weight is row-major.
    """
    return cpu_vendor() == "AuthenticAMD" or (cpu_vendor() == "GenuineIntel" and count > 2 and not column_major)


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``rows[start:end] @ weights[e]`` for every expert ``e``, whose rows end at ``ends[e]``."""
    result = rows.new_empty((rows.shape[0], weights.shape[2]))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if start < end:
            mm_into(rows[start:end], weights[expert], result[start:end])
            start = end
    result[start:].zero_()  # rows of no expert
    return result


def mm_into(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """``torch.mm(rows, weight, out=out)`` with the fastest kernel."""
    result = None
    if rows.shape[0] > 0 and not must_use_aten():
        matmul = _gemv if rows.shape[0] <= MAX_ROWS else gemm_onednn.onednn_linear
        result = matmul(rows, weight.t(), None)
    if result is None:
        torch.mm(rows, weight, out=out)
    else:
        out.copy_(result)


def _gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """``x @ weight.T + bias``; None where the kernel cannot or should not be used."""
    if not (is_plain(x) and is_plain(weight) and (bias is None or is_plain(bias))):
        return None
    if weight.dim() != 2 or weight.numel() < MIN_WEIGHT_SIZE:
        return None
    outputs, inputs = weight.shape
    column_major = weight.stride(1) != 1
    if (column_major and weight.stride(0) != 1) or x.shape[-1] != inputs or not inputs:
        return None
    if bias is not None and (bias.shape != (outputs,) or not bias.is_contiguous()):
        return None
    count = x.numel() // inputs
    function = load_kernel("gemv") if 0 < count <= MAX_ROWS and is_faster(count, column_major) else None
    if function is None:
        return None
    rows = x if x.is_contiguous() else x.contiguous()
    out = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32, device="cpu")
    addresses = (rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    stride = weight.stride(1 if column_major else 0)
    sizes = (torch.get_num_threads(), count, inputs, outputs, inputs, stride, column_major)
    function(ctypes.byref(_Call(*addresses, *sizes)))
    return out


# -- as an operator ------------------------------------------------------------------------------------------------


def fits(x: Any, weight: Any) -> bool:
    """Whether the kernel should compute ``x @ weight`` for tensors like these, which may be fake."""
    for tensor in (x, weight):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or tensor.dtype != torch.float32:
            return False
        if not tensor.is_cpu or not all(isinstance(n, int) for n in tensor.shape):
            return False
    if not 0 < x.shape[0] <= MAX_ROWS or weight.numel() < MIN_WEIGHT_SIZE:
        return False
    return is_faster(x.shape[0], weight.stride(1) == 1) and load_kernel("gemv") is not None


def _gemv_or_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = _gemv(x, weight, bias)
    return torch_linear(x, weight, bias).contiguous() if result is None else result


def _grouped_mm_fake(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weights.shape[2]))


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define("cpu_gemv(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("cpu_gemv", _gemv_or_linear, "CPU")
torch.library.register_fake(
    "paraxis::cpu_gemv", lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=_library
)
_library.define("cpu_grouped_mm(Tensor rows, Tensor weights, Tensor ends) -> Tensor")
_library.impl("cpu_grouped_mm", grouped_mm, "CPU")
torch.library.register_fake("paraxis::cpu_grouped_mm", _grouped_mm_fake, lib=_library)
