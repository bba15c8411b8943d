"""GEMV with quantized weights on a GPU: linear layers on a single row that read the packed bytes once.

As for :mod:`.gemv`, the operators right before and after are fused: the residual sum and RMSNorm before, the SiLU gate
of a feed-forward layer after. Layers on the same input are one kernel. Everything is computed in float32; the decoded
weight is not rounded to another dtype first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from ..quantized.encoding import FP4, INT4, UINT4, Encoding, Parts
from ..quantized.gemv import MAX_WEIGHTS
from . import quantized_gemv_kernel as kernels
from . import resident_gemv_kernel as resident
from .quantized_gemv_kernel import quantized_gemv_kernel
from .resident_gemv_kernel import resident_gemv_kernel

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton interprets kernels, which it cannot where they have assembly."""
_E8M0 = torch.float8_e8m0fnu

_KINDS: dict[tuple[float, ...], tuple[int, float]] = {
    (): (kernels.BYTES, 0.0),
    INT4: (kernels.NIBBLES, 136.0),
    UINT4: (kernels.NIBBLES, 128.0),
    FP4: (kernels.FP4, 0.0),
}
"""By the table of codes: how they are decoded, and what is subtracted from the result."""


class Sizes(NamedTuple):
    """The tile of a program.

    Attributes:
        rows: Rows of a weight.
        groups: Groups of columns per step.
        warps: Warps.
        programs: Programs that run over all tiles; 0 for a program per tile.
    """

    rows: int
    groups: int
    warps: int
    programs: int = 0


def sizes(rows: int, row_bytes: int, group_bytes: int, gated: bool) -> Sizes:
    """The tile for weights of so many rows; ``group_bytes``: what is loaded for a group."""
    warps = 4 if row_bytes >= 2048 else 2
    groups = max(1, min(warps * 32 * 16 // group_bytes, triton.next_power_of_2(triton.cdiv(row_bytes, group_bytes))))
    most = 8 if gated else 16
    if rows < 132 * 4 * most:
        most = max(2, triton.next_power_of_2(rows // (132 * 4) + 1) // 2)
    return Sizes(min(most, 16), groups, warps)


def resident_sizes(rows: int, row_bytes: int, group_bytes: int, gated: bool, device: torch.device) -> Sizes:
    """The tile where few programs hold the row in registers.

    Preparing the row takes each program as long as several tiles, so there are eight warps per multiprocessor and no
    more: with 16 bytes for each of eight rows and thread, 32 KB are on their way, about what the memory delivers while
    it is waited for. Rows of a tile are so many that all programs have equal work.
    """
    warps = max(1, min(4 if row_bytes <= 4096 else 8, triton.next_power_of_2(triton.cdiv(row_bytes, 16)) // 32))
    groups = max(1, warps * 32 * 16 // group_bytes)
    programs = _multiprocessors(device) * (8 // warps)

    def work(each: int) -> int:
        return each * triton.cdiv(triton.cdiv(rows, each), programs)

    return Sizes(min((4, 2) if gated else (8, 4, 2), key=work), groups, warps, programs)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def resident_kind(encoding: Encoding, weight: Parts, dtype: torch.dtype) -> int | None:
    """How the kernel that holds the row in registers decodes a weight; None if it does not.

    It rounds rows to integers of 16 bits for weights of integers, which is for 16-bit floats alone.
    """
    codes = weight.codes.dtype
    if encoding.table in (INT4, UINT4):
        return resident.NIBBLES if dtype.itemsize == 2 else None
    if encoding.packed or (weight.zeros is not None and codes.is_floating_point):
        return None
    if codes == torch.int8:
        return resident.INT8 if dtype.itemsize == 2 else None
    return {torch.float8_e4m3fn: resident.FLOAT8, torch.float8_e5m2: resident.E5M2}.get(codes)


@lru_cache(maxsize=16)
def _table(table: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.float32, device=device)


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The offsets of the second and third tensor from the first one in memory, in elements."""
    found = [(t.data_ptr() - tensors[0].data_ptr()) // t.element_size() for t in tensors[1:]]
    return found + [0] * (MAX_WEIGHTS - 1 - len(found))


def launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    weights: Sequence[Parts],
    encoding: Encoding,
    biases: Sequence[torch.Tensor],
    gated: bool,
    total: torch.Tensor | None,
    tile: Sizes | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Run the kernel; ``total`` receives the sum of ``x`` and ``residual``."""
    first, features = weights[0], x.shape[-1]
    rows = [w.codes.shape[0] for w in weights]
    out = x.new_empty((*x.shape[:-1], rows[0] if gated else sum(rows)))
    late = first.scales.shape[1] == 1
    kind, offset = _KINDS.get(encoding.table, (kernels.TABLE, 0.0))
    # only where a caller asks for it, since it was not run on a GPU yet: the other kernel was
    held = resident_kind(encoding, first, x.dtype) if tile is not None and tile.programs else None
    width = min(128, triton.next_power_of_2(features)) if late else encoding.block[1]
    packed = 2 if encoding.packed else 1
    shape = rows[0] if gated else sum(rows), features // packed, width // packed, gated
    words = encoding.packed or held is not None
    per_word = 1 if not words else 8 if encoding.packed else 4
    exponents = encoding.exponents or first.scales.dtype == _E8M0
    scales = [w.scales.view(torch.uint8) if w.scales.dtype == _E8M0 else w.scales for w in weights]
    codes = [w.codes.view(torch.int32) if words else w.codes for w in weights]
    zeros = [w.zeros for w in weights if w.zeros is not None]
    index = [w.rows for w in weights if w.rows is not None]
    factor = [w.factor for w in weights if w.factor is not None]
    pointers = (
        x,
        x if residual is None else residual,
        x if norm is None else norm,
        out if total is None else total,
        codes[0],
        scales[0],
        zeros[0] if zeros else x,
        index[0] if index else x,
        factor[0] if factor else x,
        biases[0] if biases else x,
    )
    numbers = (
        eps,
        *rows,
        *[0] * (MAX_WEIGHTS - len(rows)),
        *(offset for tensors in (codes, scales, zeros, index, factor, biases) for offset in _offsets(tensors)),
    )
    every = encoding.block[0]
    options = {
        "K": features,
        "PADDED_K": triton.next_power_of_2(features),
        "GROUPS": first.scales.shape[1],
        "GROUP_ROWS": 0 if all(w.scales.shape[0] == 1 for w in weights) else every,
        "LATE": late,
        "EXPONENTS": exponents,
        "ZEROS": bool(zeros),
        "INDEX": bool(index),
        "FACTOR": 0 if not factor else 1 if factor[0].shape[0] > 1 else 2,
        "ROUNDED": encoding.activations == f"float8 {width}" and not encoding.packed and not late,
        "RESIDUAL": residual is not None,
        "NORM": norm is not None,
        "BIAS": bool(biases),
        "GATED": gated,
        "ASM": not INTERPRETED,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    chosen = tile or sizes(*shape)
    tiles = triton.cdiv(rows[0], chosen.rows) if gated else sum(triton.cdiv(n, chosen.rows) for n in rows)
    vector = 4 if words else 16
    blocks = {"BLOCK_N": chosen.rows, "BLOCK_G": chosen.groups, "CHUNKS": width // per_word // vector, "VECTOR": vector}
    options |= {**blocks, "num_warps": chosen.warps}
    if held is not None:
        grid = min(tiles, chosen.programs)
        options |= {"KIND": held, "OFFSET": 8 if encoding.table == INT4 else 0, "REPEAT": triton.cdiv(tiles, grid)}
        resident_gemv_kernel[(grid,)](*pointers, out, *numbers, tiles, **options)
        return out
    table = _table(encoding.table, x.device) if kind == kernels.TABLE else x
    quantized_gemv_kernel[(tiles,)](*pointers, table, out, *numbers, KIND=kind, OFFSET=offset, **options)
    return out
