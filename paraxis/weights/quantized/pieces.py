"""How a parameter is put together of quantized weights: one, or rows of several (experts, ``[gate|up]``).

The recipes that put dense weights together (:mod:`paraxis.weights.convert`) are run on the *positions* of rows and
columns: where they end says how the parameter consists of stored weights, whatever the recipe is.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...errors import CheckpointError
from ...placement import Ranges
from ..convert import Conversion
from .stored import Stored


class Piece(NamedTuple):
    """Consecutive rows of a stored weight."""

    stored: Stored
    start: int
    length: int


class Box(NamedTuple):
    """Rows of a part of one stored weight, in the units of the part, and where they are in a parameter's shard."""

    at: int
    stored: Stored
    rows: Ranges
    out_start: int
    length: int


@dataclass(eq=False)
class Composition:
    """A parameter as pieces of stored weights.

    Attributes:
        stack: The pieces of every weight of the stack, in order; of one weight for a matrix.
        stacked: Whether the stored weights are matrices and the parameter is a stack of them.
        transposed: Whether the parameter has its last two dimensions as ``[in, out]``.
        columns: The size of the dimension ``in``.
    """

    stack: list[list[Piece]]
    stacked: bool
    transposed: bool
    columns: int

    @property
    def format_name(self) -> str:
        """The name of the format."""
        return self.first.format.name

    @property
    def first(self) -> Stored:
        """One of the stored weights, which all have one format."""
        return self.stack[0][0].stored

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start in its stored weight, length) of the pieces of a weight, the same for all of the stack."""
        return [(piece.start, piece.length) for piece in self.stack[0]]

    @property
    def stored(self) -> list[Stored]:
        """All stored weights."""
        return list({id(piece.stored): piece.stored for pieces in self.stack for piece in pieces}.values())

    def boxes(self, which: Ranges, rows: Ranges, block: int) -> Iterator[Box]:
        """What to read for some weights of the stack and ranges of the rows of a part, in its units."""
        at = 0
        for start, stop in which:
            for i in range(start, stop):
                yield from self._boxes(at, self.stack[i], rows, block)
                at += 1

    def _boxes(self, at: int, pieces: Sequence[Piece], rows: Ranges, block: int) -> Iterator[Box]:
        first = 0
        for piece in pieces:
            begin = piece.start // block
            count = -(-(piece.start + piece.length) // block) - begin
            position = 0
            for start, stop in rows:
                a, b = max(start, first), min(stop, first + count)
                if a < b:
                    inside = ((a - first + begin, b - first + begin),)
                    yield Box(at, piece.stored, inside, position + a - start, b - a)
                position += stop - start
            first += count


def of_one(stored: Stored) -> Composition:
    """A parameter that is one stored weight."""
    piece = Piece(stored, 0, stored.shape[-2])
    return Composition([[piece]], False, stored.format.transposed, stored.shape[-1])


def of_conversion(conversion: Conversion, stored: Mapping[str, Stored]) -> dict[str, Composition]:
    """The parameters that a recipe makes of quantized weights.

    Raises:
        CheckpointError: the recipe does more than put rows together, or not all of its weights are quantized alike.
    """
    sources = [stored.get(key) for key in conversion.keys]
    missing = [key for key, each in zip(conversion.keys, sources, strict=True) if each is None]
    if missing:
        raise CheckpointError(
            f"{conversion.first}: {len(missing)} of the {len(sources)} weights that it consists of are not quantized, "
            f"such as {missing[0]}, and the others are"
        )
    known = [each for each in sources if each is not None]
    if len({(each.format, *sorted(each.headers)) for each in known}) > 1:
        raise CheckpointError(f"{conversion.first}: the weights that it consists of have different formats")
    by_key = dict(zip(conversion.keys, known, strict=True))
    offset, ids, widths = 0, dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    owners: list[tuple[int, Stored]] = []
    for key, each in by_key.items():
        rows, columns = each.shape[-2:]
        ids[key] = torch.arange(offset, offset + rows).unsqueeze(1)
        widths[key] = torch.arange(columns).unsqueeze(0)
        owners.append((offset, each))
        offset += rows
    try:
        at_rows, at_columns = conversion.run(ids.__getitem__), conversion.run(widths.__getitem__)
    except Exception as error:
        raise CheckpointError(
            f"{conversion.first}: quantized weights cannot be converted: {type(error).__name__}: {error}"
        ) from error
    return {
        name: _composition(name, at_rows[name], at_columns[name], owners, conversion.targets[name])
        for name in conversion.targets
    }


def _composition(
    name: str,
    rows: torch.Tensor,
    columns: torch.Tensor,
    owners: Sequence[tuple[int, Stored]],
    shape: tuple[int, ...],
) -> Composition:
    transposed = rows.shape[-1] != 1
    if transposed:
        rows, columns = rows.transpose(-1, -2), columns.transpose(-1, -2)
    plain = torch.equal(columns, torch.arange(columns.shape[-1]).expand_as(columns))
    if rows.shape[-1] != 1 or not plain or rows.dim() not in (2, 3) or rows.dim() != len(shape):
        raise CheckpointError(f"{name}: quantized weights that are converted in this way are not supported")
    table = rows.squeeze(-1) if rows.dim() == 3 else rows.squeeze(-1).unsqueeze(0)
    stack = [_pieces(row.tolist(), owners) for row in table]
    first = [(p.start, p.length) for p in stack[0]]
    if any([(p.start, p.length) for p in pieces] != first for pieces in stack):
        raise CheckpointError(f"{name}: the weights of a stack are put together in different ways")
    return Composition(stack, rows.dim() == 3, transposed, columns.shape[-1])


def _pieces(ids: Sequence[int], owners: Sequence[tuple[int, Stored]]) -> list[Piece]:
    """Consecutive positions as pieces."""
    found: list[Piece] = []
    starts = [offset for offset, _ in owners]
    i = 0
    while i < len(ids):
        owner = _owner(starts, ids[i])
        offset, stored = owners[owner]
        stop = i + 1
        while stop < len(ids) and ids[stop] == ids[stop - 1] + 1 and ids[stop] < offset + stored.shape[-2]:
            stop += 1
        found.append(Piece(stored, ids[i] - offset, stop - i))
        i = stop
    return found


def _owner(starts: Sequence[int], position: int) -> int:
    return bisect.bisect_right(starts, position) - 1
