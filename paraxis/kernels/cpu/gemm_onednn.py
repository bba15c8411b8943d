"""Products of many rows with a weight, on a CPU: what prompts take most of their time for.

torch leaves those in float32 to MKL, which is Intel's. On processors of AMD, oneDNN, which torch brings too, is faster:
by a tenth where there are hundreds of rows, by more where there are ten.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .build import is_plain, maker

LEAST = 1 << 23
"""Multiplications; with fewer of them what oneDNN does for a call is not made up for."""
ROWS = 256
"""How many there may be, where that is not known before."""


def pays(multiplications: int) -> bool:
    """Whether oneDNN is faster. Not found out by measuring: ranks of a machine compute the same."""
    if multiplications < LEAST or maker() != "AuthenticAMD":
        return False
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()


def multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """``x @ weight.T + bias``; None if that is better left to torch."""
    if weight.dim() != 2 or not pays(x.numel() * weight.shape[0]) or x.shape[-1] != weight.shape[1]:
        return None
    if not (is_plain(x) and is_plain(weight) and x.is_contiguous() and _is_matrix(weight)):
        return None
    if bias is not None and not (is_plain(bias) and bias.shape == weight.shape[:1] and bias.is_contiguous()):
        return None
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _is_matrix(weight: torch.Tensor) -> bool:
    """Whether its rows, or its columns, lie one behind the other."""
    (rows, columns), (down, along) = weight.shape, weight.stride()
    return (along == 1 and down >= columns) or (down == 1 and along >= rows)


# -- as an operator ------------------------------------------------------------------------------------------------


def fits(x: Any, weight: Any) -> bool:
    """Whether ``x @ weight`` of tensors like these, which may be fake, may be for oneDNN."""
    for tensor in (x, weight):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or tensor.dtype != torch.float32:
            return False
        if not tensor.is_cpu:
            return False
    if not all(isinstance(n, int) for n in (*weight.shape, *weight.stride(), *x.stride())):
        return False
    if x.stride() != (x.shape[1], 1) or not _is_matrix(weight):
        return False
    return pays((x.shape[0] if isinstance(x.shape[0], int) else ROWS) * weight.numel())


def _many_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = multiplied(x, weight, bias)
    return F.linear(x, weight, bias).contiguous() if result is None else result


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define("many_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("many_rows", _many_rows, "CPU")
torch.library.register_fake(
    "paraxis::many_rows", lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=_library
)
