"""How a quantized weight is encoded in memory: the one form that all checkpoint formats are read into.

A weight ``[..., out, in]`` is *codes* of eight or four bits, of which each stands for a number, times a *scale* per
block of rows and columns. Checkpoint formats differ in how they pack and order the same numbers; they are unpacked and
packed again without loss when they are read and written, so that every kernel exists once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The sixteen numbers of E2M1."""
INT4 = tuple(float(n) for n in range(-8, 8))
"""Signed integers that are stored with 8 added."""
UINT4 = tuple(float(n) for n in range(16))
"""Unsigned integers, from which a zero point is subtracted."""


@dataclass(frozen=True)
class Encoding:
    """What the codes and scales of a weight mean.

    Attributes:
        block: Rows and columns of the weight that have one scale.
        table: The numbers that codes of four bits stand for, which are packed two per byte along the last dimension,
            the first in the low bits; empty where a code is a number of eight bits.
        rounding: The dtype in which the format multiplies by the scale: products are rounded to it.
        exponents: Scales are bytes that are exponents of two, with 127 added.
        activations: How kernels on a GPU round the inputs of a layer, as the unsharded model does there and not on a
            CPU: ``"float8 128"`` to float8, with a scale per 128 columns; empty if they do not.
    """

    block: tuple[int, int] = (1, 1)
    table: tuple[float, ...] = ()
    rounding: str = ""
    exponents: bool = False
    activations: str = ""

    @property
    def packed(self) -> bool:
        """Whether a byte has two codes."""
        return bool(self.table)

    @property
    def key(self) -> str:
        """The encoding as text, which operators take; see :func:`encoding_of`."""
        return json.dumps(asdict(self))

    @property
    def rounding_dtype(self) -> torch.dtype | None:
        """The dtype that products are rounded to, if any."""
        return getattr(torch, self.rounding) if self.rounding else None


@lru_cache(maxsize=256)
def encoding_of(key: str) -> Encoding:
    """The inverse of :attr:`Encoding.key`."""
    data = json.loads(key)
    return Encoding(**{**data, "block": tuple(data["block"]), "table": tuple(data["table"])})


class Parts(NamedTuple):
    """The tensors of a quantized weight ``[..., out, in]``.

    Attributes:
        codes: ``[..., out, in]`` of eight bits, or ``[..., out, in / 2]`` bytes of two codes.
        scales: ``[..., blocks of rows, blocks of columns]``.
        zeros: Zero points, in the shape of the scales, or broadcast to it.
        rows: The block of each row, where row ``i`` is not in block ``i // block``.
        columns: The same for columns, such as groups in the order of activations.
        factor: ``[..., out, 1]``: what the scales of a row are multiplied by.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    def present(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that there are, by name."""
        for name, tensor in zip(self._fields, self, strict=True):
            if tensor is not None:
                yield name, tensor

    def map(self, function: Any) -> Parts:
        """The function of every tensor that there is."""
        found: list[Any] = [None if tensor is None else function(tensor) for tensor in self]
        return Parts(*found)

    @property
    def nbytes(self) -> int:
        """Their memory."""
        return sum(tensor.numel() * tensor.dtype.itemsize for _, tensor in self.present())
