"""Random quantized weights in the forms that the Triton kernels take. ``TRITON_INTERPRET=1`` runs these on a CPU."""

from __future__ import annotations

import os

import pytest
import torch

from paraxis.kernels.quantized import Encoding, Parts
from paraxis.kernels.quantized.encoding import FP4, INT4, UINT4

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs a GPU")
ROUNDING = 8e-3 if INTERPRETED else 4e-3
"""The relative error of bfloat16, to which the interpreter rounds towards zero."""


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def weight(form: str, rows: int, columns: int) -> tuple[Parts, Encoding]:
    """A random weight in one of the forms that the kernel takes."""
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    float8 = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    int8 = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)

    def grid(block_rows: int, block_columns: int) -> torch.Tensor:
        return torch.rand(-(-rows // block_rows), -(-columns // block_columns)) + 0.1

    zeros = torch.randint(0, 16, grid(1, 128).shape, dtype=torch.uint8)
    exponents = torch.randint(115, 130, grid(1, 32).shape, dtype=torch.uint8)
    some_rows = torch.randint(0, grid(128, 128).shape[0], (rows,), dtype=torch.int32)
    table = tuple(torch.linspace(-1, 1.1, 16).tolist())
    return {
        "float8 blocks": (Parts(float8, grid(128, 128)), Encoding((128, 128))),
        "float8 blocks, index": (Parts(float8, grid(128, 128), rows=some_rows), Encoding((128, 128))),
        "float8 e5m2": (Parts(float8.to(torch.float8_e5m2), grid(128, 128)), Encoding((128, 128))),
        "float8 rows": (Parts(float8, grid(1, columns)), Encoding((1, columns))),
        "float8": (Parts(float8, grid(rows, columns)), Encoding((rows, columns))),
        "int8 rows": (Parts(int8, grid(1, columns), factor=grid(1, columns)), Encoding((1, columns))),
        "int8 zeros": (Parts(int8, grid(1, 128), zeros.to(torch.int8)), Encoding((1, 128))),
        "int4": (Parts(packed, grid(1, 128).bfloat16()), Encoding((1, 128), INT4)),
        "int4 rows": (Parts(packed, grid(1, columns).half()), Encoding((1, columns), INT4)),
        "int4 of 32": (Parts(packed, grid(1, 32)), Encoding((1, 32), INT4)),
        "uint4": (Parts(packed, grid(1, 128).half(), zeros), Encoding((1, 128), UINT4)),
        "exponents": (Parts(packed, exponents), Encoding((1, 32), FP4, exponents=True)),
        "table": (Parts(packed, grid(1, 64)), Encoding((1, 64), table)),
    }[form]


FORMS = (
    "float8 blocks",
    "float8 blocks, index",
    "float8 e5m2",
    "float8 rows",
    "float8",
    "int8 rows",
    "int8 zeros",
    "int4",
    "int4 rows",
    "int4 of 32",
    "uint4",
    "exponents",
    "table",
)
