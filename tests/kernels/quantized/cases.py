"""Random quantized weights in every form that an encoding has, and what they stand for, element by element."""

from __future__ import annotations

from typing import Any

import torch

from paraxis.kernels.quantized import Encoding, Parts
from paraxis.kernels.quantized.encoding import FP4, INT4, UINT4


def case(
    rows: int,
    columns: int,
    encoding: Encoding,
    *,
    zeros: bool = False,
    factor: bool = False,
    index: str = "",
    stack: int = 0,
) -> tuple[Parts, Encoding, torch.Tensor]:
    """(parts, encoding, weight in float64)."""
    torch.manual_seed(rows * 1000 + columns)
    front = (stack,) if stack else ()
    grid = (*front, -(-rows // encoding.block[0]), -(-columns // encoding.block[1]))
    if encoding.packed:
        numbers = torch.randint(0, 16, (*front, rows, columns))
        even = torch.nn.functional.pad(numbers, (0, columns % 2))
        codes = (even[..., ::2] | (even[..., 1::2] << 4)).to(torch.uint8)
        values = torch.tensor(encoding.table, dtype=torch.float64)[numbers]
    else:
        codes = torch.randn(*front, rows, columns).to(torch.float8_e4m3fn)
        values = codes.double()
    r, c = torch.arange(rows) // encoding.block[0], torch.arange(columns) // encoding.block[1]
    parts: dict[str, Any] = {"codes": codes}
    if "rows" in index:
        r = torch.randint(0, grid[-2], (rows,))
        parts["rows"] = r.to(torch.int32)
    if "columns" in index:
        c = torch.randint(0, grid[-1], (columns,))
        parts["columns"] = c.to(torch.int32)
    parts["scales"] = torch.randint(120, 130, grid).to(torch.uint8) if encoding.exponents else torch.rand(grid) + 0.5
    scales = torch.exp2(parts["scales"].double() - 127) if encoding.exponents else parts["scales"].double()
    if zeros:
        parts["zeros"] = torch.randint(0, 16, grid).to(torch.uint8)
        values = values - parts["zeros"].double()[..., r, :][..., c]
    if factor:
        parts["factor"] = torch.rand(*front, rows, 1) + 0.5
        values = values * parts["factor"].double()
    return Parts(**parts), encoding, values * scales[..., r, :][..., c]


CASES = {
    "blocks": case(40, 48, Encoding((16, 16))),
    "blocks that do not divide": case(37, 45, Encoding((16, 16))),
    "per row": case(33, 20, Encoding((1, 20))),
    "one scale": case(33, 20, Encoding((33, 20))),
    "groups": case(24, 64, Encoding((1, 16), INT4)),
    "groups that do not divide": case(24, 61, Encoding((1, 16), INT4)),
    "zero points": case(24, 64, Encoding((1, 16), UINT4), zeros=True),
    "exponents": case(24, 64, Encoding((1, 32), FP4, exponents=True)),
    "two levels of scales": case(24, 64, Encoding((1, 16), FP4), factor=True),
    "index of rows": case(24, 64, Encoding((16, 16)), index="rows"),
    "index of columns": case(24, 64, Encoding((1, 16), UINT4), zeros=True, index="columns"),
    "index of both": case(24, 64, Encoding((16, 16)), index="rows columns"),
    "stack": case(24, 32, Encoding((16, 16)), stack=3),
    "stack of groups": case(24, 32, Encoding((1, 16), INT4), stack=3, factor=True),
    "one row": case(1, 32, Encoding((16, 16))),
}
