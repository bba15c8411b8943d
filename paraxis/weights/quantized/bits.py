"""Packing and unpacking codes of a few bits: exact inverses of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...placement import Ranges
from .format import Index, covering, elements

NIBBLES = tuple(range(8))
"""The order of eight codes in 32 bits: the first in the lowest bits."""


def unpack_int32(words: torch.Tensor, bits: int, dim: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Codes of ``bits`` bits along a dimension of 32-bit words, as bytes; ``order``: the position of each in a word."""
    count = 32 // bits
    shifts = torch.tensor(
        [bits * position for position in order or range(count)], dtype=torch.int32, device=words.device
    )
    moved = words.movedim(dim, -1).unsqueeze(-1)
    codes = (moved >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2).movedim(-1, dim)


def pack_int32(codes: torch.Tensor, bits: int, dim: int, order: Sequence[int] = ()) -> torch.Tensor:
    """The inverse of :func:`unpack_int32`; a last word that is not full ends with zeros."""
    count = 32 // bits
    moved = codes.movedim(dim, -1)
    missing = -moved.shape[-1] % count
    if missing:
        moved = torch.nn.functional.pad(moved, (0, missing))
    shifts = torch.tensor(
        [bits * position for position in order or range(count)], dtype=torch.int64, device=codes.device
    )
    words = (moved.unflatten(-1, (-1, count)).to(torch.int64) << shifts).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes of four bits along the last dimension, two per byte, the first in the low bits."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_pairs(pairs: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of :func:`pack_pairs`: ``count`` codes."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)[..., :count]


def read_words(
    read: Callable[[Index], torch.Tensor],
    index: Index,
    bits: int,
    dim: int,
    size: int,
    order: Sequence[int] = (),
) -> torch.Tensor:
    """A box of codes that are stored in 32-bit words along a dimension of ``size`` codes: only its words are read.

    ``read``: from a box of words to their values.
    """
    dim %= len(index)
    words, chosen = covering(index[dim], 32 // bits, size)
    found = unpack_int32(read((*index[:dim], words, *index[dim + 1 :])), bits, dim, order)
    return found if len(chosen) == found.shape[dim] else found.index_select(dim, chosen)


def bytes_as_codes(ranges: Ranges, size: int) -> Ranges:
    """The codes of bytes that have two each, of ``size`` codes."""
    return elements(ranges, 2, size)
