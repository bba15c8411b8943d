"""Kernels in C++, built with Inductor's tools where no process of this machine has before."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad

LANES = 8
"""Kernels take features by so many."""
_PLAIN = (torch.Tensor, nn.Parameter)


@cache
def kernel(name: str) -> Any:
    """The function of ``name``.cpp, which takes a pointer to a structure; None where it cannot be built."""
    from torch._inductor.codecache import CppCodeCache

    here = Path(__file__).parent
    try:
        library = CppCodeCache.load((here / "vectors.h").read_text() + (here / f"{name}.cpp").read_text())
    except Exception as error:  # no compiler, or one that does not know vectors or threads
        logging.getLogger("paraxis").info("what %s.cpp does is left to torch: %s", name, error)
        return None
    function = library.run
    function.restype = None
    return function


def watched() -> bool:
    """Whether somebody has to see torch's own operators: to differentiate, trace, count, cast or batch them."""
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.is_autocast_enabled("cpu")
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or _len_torch_dispatch_stack_pre_dispatch() > 0
    )


@cache
def maker() -> str:
    """Who made the processor; empty where that cannot be told, or is nobody that kernels were tried with."""
    try:
        shown = Path("/proc/cpuinfo").read_text()[:4096]
    except OSError:
        return ""
    return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in shown), "")


def is_plain(x: torch.Tensor) -> bool:
    """Whether numbers lie in memory as a tensor says, in float32."""
    if type(x) not in _PLAIN or x.dtype != torch.float32 or not x.is_cpu:
        return False
    return x.layout is torch.strided and not x.is_neg()


def call_of(pointers: str, numbers: str, real: str = "") -> type[ctypes.Structure]:
    """The structure that a kernel takes, of these names: pointers, then whole numbers, then others."""
    kinds = ((pointers, ctypes.c_void_p), (numbers, ctypes.c_int64), (real, ctypes.c_double))
    return type(
        "Call", (ctypes.Structure,), {"_fields_": [(name, kind) for names, kind in kinds for name in names.split()]}
    )


def threads_for(heads: int) -> int:
    """How many threads to share heads out to; 0 where torch, which shares out more than heads, has more of them."""
    threads = torch.get_num_threads()
    return threads if threads <= heads else 0


def in_rows(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """With the features of a row side by side."""
    return [x if x.stride(3) == 1 else x.contiguous() for x in tensors]


def strides(tensors: Iterable[torch.Tensor], dims: int) -> list[int]:
    """Those of the first dimensions of each."""
    return [stride for x in tensors for stride in x.stride()[:dims]]


def pointers(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]
