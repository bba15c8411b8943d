"""Quantizing to integers: scales and zero points of blocks, by rounding to the nearest."""

from __future__ import annotations

import torch

from ...kernels.quantized import Encoding
from ...kernels.quantized.encoding import INT4, UINT4


def integer_encoding(block: tuple[int, int], bits: int, symmetric: bool) -> Encoding:
    """What integers of this many bits mean: signed, or unsigned with a zero point where they are of four bits."""
    if bits == 4:
        return Encoding(block=block, table=INT4 if symmetric else UINT4)
    return Encoding(block=block)


def as_blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """``[..., blocks of rows, rows, blocks of columns, columns]``; the last ones are filled with zeros."""
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    return padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))


def from_blocks(tiles: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The inverse of :func:`as_blocks`."""
    return tiles.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]].contiguous()


def quantize_integers(
    weight: torch.Tensor, block: tuple[int, int], bits: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, zero points) per block: codes and zero points are signed, in int8."""
    rows, columns = weight.shape[-2:]
    block = (min(block[0], rows), min(block[1], columns))
    tiles = as_blocks(weight, block)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    least, most = tiles.amin((-3, -1)).clamp(max=0), tiles.amax((-3, -1)).clamp(min=0)
    if symmetric:
        scales = torch.maximum(-least, most) * 2 / (high - low)
        zeros = torch.zeros_like(scales)
    else:
        scales = (most - least) / (high - low)
    scales = scales.to(weight.dtype)
    scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
    if not symmetric:
        zeros = (low - least / scales.float()).round().clamp(low, high)
    spread = (scales.float()[..., :, None, :, None], zeros.float()[..., :, None, :, None])
    codes = (tiles / spread[0] + spread[1]).round().clamp(low, high)
    return from_blocks(codes, tuple(weight.shape)).to(torch.int8), scales, zeros.to(torch.int8)
