"""Kernels in C++, built with Inductor's tools where no process of this machine has before."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

LANES = 8
"""Kernels take features by so many."""


@cache
def kernel(name: str) -> Any:
    """The function of ``name``.cpp, which takes a pointer to a structure; None where it cannot be built."""
    from torch._inductor.codecache import CppCodeCache

    here = Path(__file__).parent
    try:
        library = CppCodeCache.load((here / "vectors.h").read_text() + (here / f"{name}.cpp").read_text())
    except Exception as error:  # no compiler, or one that does not know vectors or threads
        logging.getLogger("paraxis").info("attention is left to torch: %s", error)
        return None
    function = library.attend
    function.restype = None
    return function


def call_of(pointers: str, numbers: str) -> type[ctypes.Structure]:
    """The structure that a kernel takes, of these names: pointers, then whole numbers, and a scale."""
    fields = [(n, ctypes.c_void_p) for n in pointers.split()] + [(n, ctypes.c_int64) for n in numbers.split()]
    return type("Call", (ctypes.Structure,), {"_fields_": [*fields, ("scale", ctypes.c_double)]})


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
