"""GEMM on a CPU with oneDNN: linear layers of many rows, which take most of the time of prefill.

torch uses MKL for float32, which is Intel's. On AMD processors oneDNN, which torch ships too, is faster: by a tenth
with hundreds of rows, by more with ten.
"""

from __future__ import annotations

from typing import Any

import torch

from ...compat.torch import linear, mkldnn_enabled
from .build import cpu_vendor, is_plain

MIN_MULTIPLICATIONS = 1 << 23
"""With fewer multiplications the overhead of a oneDNN call is not worth it."""
ASSUMED_ROWS = 256
"""The number of rows that a dynamic dimension is taken to have."""


def is_faster(multiplications: int) -> bool:
    """Whether oneDNN is faster. By a rule, not by measuring: all ranks must choose the same kernel."""
    if multiplications < MIN_MULTIPLICATIONS or cpu_vendor() != "AuthenticAMD":
        return False
    return torch.backends.mkldnn.is_available() and mkldnn_enabled()


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """``x @ weight.T + bias``; None where torch's own kernel should be used."""
    if weight.dim() != 2 or not is_faster(x.numel() * weight.shape[0]) or x.shape[-1] != weight.shape[1]:
        return None
    if not (is_plain(x) and is_plain(weight) and x.is_contiguous() and _is_matrix(weight)):
        return None
    if bias is not None and not (is_plain(bias) and bias.shape == weight.shape[:1] and bias.is_contiguous()):
        return None
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _is_matrix(weight: torch.Tensor) -> bool:
    """Whether it is a row-major or column-major matrix without overlap."""
    (rows, columns), (row_stride, column_stride) = weight.shape, weight.stride()
    return (column_stride == 1 and row_stride >= columns) or (row_stride == 1 and column_stride >= rows)


# -- as an operator ------------------------------------------------------------------------------------------------


def fits(x: Any, weight: Any) -> bool:
    """Whether oneDNN may compute ``x @ weight`` for tensors like these, which may be fake."""
    for tensor in (x, weight):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or tensor.dtype != torch.float32:
            return False
        if not tensor.is_cpu:
            return False
    if not all(isinstance(n, int) for n in (*weight.shape, *weight.stride(), *x.stride())):
        return False
    if x.stride() != (x.shape[1], 1) or not _is_matrix(weight):
        return False
    return is_faster((x.shape[0] if isinstance(x.shape[0], int) else ASSUMED_ROWS) * weight.numel())


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = onednn_linear(x, weight, bias)
    return linear(x, weight, bias).contiguous() if result is None else result


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define("onednn_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("onednn_linear", _linear, "CPU")
torch.library.register_fake(
    "paraxis::onednn_linear", lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=_library
)
