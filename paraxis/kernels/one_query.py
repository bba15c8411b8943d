"""Attention of one query per sequence on a growing cache, on a CPU: a kernel in C++, built with Inductor's tools.

torch's own kernel is made for many queries. Of one it takes half as long again as reading the cache does, and the cache
has to be extended before, by operators that take time of their own for every layer.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

LANES = 8
"""The kernel takes features by so many."""


class _Call(ctypes.Structure):
    """What the kernel is told, in the order of its own structure."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "new_keys", "new_values", "keys", "values", "out", "scores")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "groups", "length", "features")),
        *(
            (f"{name}_batch" if i == 0 else f"{name}_head", ctypes.c_int64)
            for name in ("query", "keys", "values", "cache")
            for i in (0, 1)
        ),
        ("scale", ctypes.c_double),
    ]


@cache
def kernel() -> Any:
    """The kernel, built where no process of this machine has before; None where that cannot be done."""
    from torch._inductor.codecache import CppCodeCache

    try:
        source = Path(__file__).with_suffix(".cpp").read_text()
        function = CppCodeCache.load(source).attend
    except Exception as error:  # no compiler, or one that does not know vectors
        logging.getLogger("paraxis").info("attention of one query is left to torch: %s", error)
        return None
    function.argtypes, function.restype = [ctypes.POINTER(_Call)], None
    return function


def fits(query: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether the kernel can be used for tensors like these, which may be fake."""
    rows, features = new.shape[2], new.shape[3]
    known = all(isinstance(n, int) for n in (rows, features, query.shape[1], query.shape[2], new.shape[1]))
    if not known or query.dtype != torch.float32 or new.dtype != torch.float32 or not query.is_cpu:
        return False
    return rows == 1 and query.shape[2] == 1 and features % LANES == 0 and query.shape[1] % new.shape[1] == 0


def attend_last(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Write the last row of keys and values, and attend to all of them. The rows of a head lie together."""
    if keys.shape != values.shape:
        raise RuntimeError(f"there are keys of shape {tuple(keys.shape)} and values of shape {tuple(values.shape)}")
    batch, heads, length, features = keys.shape
    groups = query.shape[1] // heads
    out = torch.empty(query.shape)
    scores = torch.empty(groups * length)
    given = [x if x.stride(3) == 1 else x.contiguous() for x in (query, new_keys, new_values)]
    strides = [x.stride(i) for x in (*given, keys) for i in (0, 1)]
    memory = [x.data_ptr() for x in (*given, keys, values, out, scores)]
    kernel()(_Call(*memory, batch, heads, groups, length, features, *strides, scale))
    return out
