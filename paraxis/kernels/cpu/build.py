"""Building and calling the C++ kernels. Inductor's tools compile them once per machine, on first use."""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compat.inductor import load_cpp_library

LANES = 8
"""Floats of a vector: kernels need a multiple of this number of features."""
_PLAIN = (torch.Tensor, nn.Parameter)


@cache
def load_kernel(name: str) -> Any:
    """The function of ``name``.cpp, which takes a pointer to a structure; None where it cannot be compiled."""
    here = Path(__file__).parent
    # What is built for this processor may not run on another one that shares the cache on disk.
    source = f"// {processor()}\n" + (here / "vectors.h").read_text() + (here / f"{name}.cpp").read_text()
    try:
        library = load_cpp_library(source)
    except Exception as error:  # no compiler, or one without vector extensions or OpenMP
        logging.getLogger("paraxis").info("torch's kernel is used instead of %s.cpp: %s", name, error)
        return None
    function = library.run
    function.restype = None
    return function


@cache
def _first_cpu() -> str:
    """What Linux knows about the first processor; elsewhere nothing."""
    try:
        return Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return ""


@cache
def cpu_vendor() -> str:
    """The vendor id of the processor; empty where it is unknown, or one that the kernels were not measured on."""
    return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in _first_cpu()), "")


@cache
def processor() -> str:
    """What the processor can do, in one line: processors for which it is the same run the same code."""
    names = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features", "isa")
    fields = [line.partition(":") for line in _first_cpu().splitlines()]
    return " ".join([platform.machine(), *(value.strip() for name, _, value in fields if name.strip() in names)])


def is_plain(x: torch.Tensor) -> bool:
    """Whether this is a strided float32 tensor in CPU memory, not a subclass nor a lazily negated view."""
    if type(x) not in _PLAIN or x.dtype != torch.float32 or not x.is_cpu:
        return False
    return x.layout is torch.strided and not x.is_neg()


def call_struct(pointers: str, integers: str, doubles: str = "") -> type[ctypes.Structure]:
    """The structure of a kernel's arguments, by their names: pointers, then integers, then doubles."""
    kinds = ((pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (doubles, ctypes.c_double))
    return type(
        "Call", (ctypes.Structure,), {"_fields_": [(name, kind) for names, kind in kinds for name in names.split()]}
    )


def threads_for(heads: int) -> int:
    """How many threads to parallelize heads over; 0 where there are fewer heads: torch parallelizes over more."""
    threads = torch.get_num_threads()
    return threads if threads <= heads else 0


def contiguous_rows(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, copied where the features (the last of four dimensions) are not contiguous."""
    return [x if x.stride(3) == 1 else x.contiguous() for x in tensors]


def strides(tensors: Iterable[torch.Tensor], dims: int) -> list[int]:
    """The strides of the first ``dims`` dimensions of each tensor, in one list."""
    return [stride for x in tensors for stride in x.stride()[:dims]]


def pointers(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The addresses of the tensors' data."""
    return [x.data_ptr() for x in tensors]
