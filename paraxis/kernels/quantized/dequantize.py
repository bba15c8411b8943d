"""Dequantize: the numbers that codes and scales stand for."""

from __future__ import annotations

from functools import lru_cache

import torch

from .encoding import INT4, UINT4, Encoding, Parts


def dequantize(parts: Parts, encoding: Encoding, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight ``[..., out, in]`` in a dtype; ``inputs`` is the size of its last dimension."""
    values = decode(parts.codes, encoding, inputs)
    if parts.zeros is not None:
        values = values - spread(parts.zeros.to(torch.float32), parts, encoding, values.shape)
    values = _scaled(values, scales_as_float(parts.scales, encoding), parts, encoding)
    if encoding.rounding_dtype is not None:
        values = values.to(encoding.rounding_dtype)
    return values.to(dtype)


def decode(codes: torch.Tensor, encoding: Encoding, inputs: int) -> torch.Tensor:
    """The numbers that the codes stand for, in float32."""
    if not encoding.packed:
        return _float8(codes) if codes.dtype == torch.float8_e4m3fn else codes.to(torch.float32)
    if encoding.table in (INT4, UINT4):
        values = _integers(codes).add_(encoding.table[0])
    else:
        pairs = _pairs(encoding.table, codes.device)
        values = torch.nn.functional.embedding(codes.to(torch.int32), pairs).flatten(-2)
    return values if values.shape[-1] == inputs else values[..., :inputs]


def _integers(codes: torch.Tensor) -> torch.Tensor:
    """The two integers of four bits of each byte, in float32: as the two bytes of an integer of 16 bits first."""
    wide = codes.to(torch.int16, memory_format=torch.contiguous_format)
    return torch.add(wide, wide >> 4, alpha=256 - 16).view(torch.uint8).to(torch.float32)


def _float8(codes: torch.Tensor) -> torch.Tensor:
    """Float8 in float32. On a CPU, torch converts one number at a time; here bits are moved, a vector at a time.

    The bits of a number in E4M3 are those of one in float16 that is 256 times smaller. NaN has other bits there.
    """
    if type(codes) is not torch.Tensor or codes.device.type != "cpu" or codes.numel() == 0:
        return codes.to(torch.float32)
    signed = codes.view(torch.int8)
    if int(signed.max()) == 127 or int(codes.view(torch.uint8).max()) == 255:
        return codes.to(torch.float32)
    wide = signed.to(torch.int16)
    bits = (wide << 7).add_((wide >> 15) << 14)  # the sign, one bit further than the rest
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)


def scales_as_float(scales: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Scales in float32."""
    values = scales.to(torch.float32)
    return torch.exp2(values - 127) if encoding.exponents else values


def spread(blocks: torch.Tensor, parts: Parts, encoding: Encoding, shape: torch.Size) -> torch.Tensor:
    """What there is per block of rows and columns, per row and column of a weight of this shape."""
    return _spread(
        _spread(blocks, parts.rows, encoding.block[0], shape, -2), parts.columns, encoding.block[1], shape, -1
    )


def _scaled(values: torch.Tensor, scales: torch.Tensor, parts: Parts, encoding: Encoding) -> torch.Tensor:
    """``values`` times the scales of their blocks, in place."""
    block = encoding.block[1]
    scales = _spread(scales, parts.rows, encoding.block[0], values.shape, -2)
    if parts.factor is not None:
        scales = scales * parts.factor
    if parts.columns is None and scales.shape[-1] > 1 and values.shape[-1] == scales.shape[-1] * block:
        values.unflatten(-1, (-1, block)).mul_(scales.unsqueeze(-1))
        return values
    return values.mul_(_spread(scales, parts.columns, block, values.shape, -1))


def _spread(blocks: torch.Tensor, index: torch.Tensor | None, block: int, shape: torch.Size, dim: int) -> torch.Tensor:
    """Along one dimension; what one block has for all is broadcast."""
    if index is not None:
        return blocks.index_select(dim, index)
    if blocks.shape[dim] == 1 or block == 1:
        return blocks
    return blocks.repeat_interleave(block, dim).narrow(dim, 0, shape[dim])


@lru_cache(maxsize=64)
def _pairs_on_host(table: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([[table[byte & 15], table[byte >> 4]] for byte in range(256)], dtype=torch.float32)


def _pairs(table: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The two numbers of each byte, ``[256, 2]``."""
    return _pairs_on_host(table).to(device)
