"""Rules written as tables: one line per way to run the operator on shards.

    table("S(0), R -> S(0)", "S(-1), S(0) -> S(-1)", "P, R -> P")

A line has one entry for every tensor among the inputs, an arrow, and one for every tensor of the result:

- ``R``: every rank has all of it.
- ``P``: every rank has a term of a sum.
- ``S(d)``: cut along dimension ``d``; a negative one counts from the end. All entries of a line that are cut have
  dimensions of the same size there, with the same layout. The line is not offered for other sizes.
- ``S(d x2)``: the dimension is packed from two segments (``[gate|up]``), each cut like the other entries.
- ``S(d*)``: its size may be a whole multiple of the others', or the reverse: one index of the short dimension stands
  for as many consecutive ones of the long.

Integers among the arguments that count something along the cut dimension are named after a semicolon, as in
``"S(2), S(2) -> S(2); num_heads"``: each rank gets its share of them, and the dimension is cut between whole units.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import lcm
from typing import Any

from ..placement import PARTIAL, REPLICATE, Layout, Placement, Shard
from .base import Call, InputPlacement, Rule, Strategy, Structures, Tensor, draws, is_partial, layouts_on, same_size

_ENTRY = re.compile(r"R|P|S\(\s*(-?\d+)\s*(?:x\s*(\d+)|(\*))?\s*\)")


@dataclass(frozen=True)
class Entry:
    """The placement of one tensor in a line: its ``dim`` is cut, in each of ``repeats`` segments, or as a multiple."""

    letter: str
    dim: int = 0
    repeats: int = 1
    multiple: bool = False

    def __str__(self) -> str:
        if self.letter != "S":
            return self.letter
        return f"S({self.dim}{'*' if self.multiple else ''}{f' x{self.repeats}' if self.repeats > 1 else ''})"

    def at(self, tensor: Tensor) -> int | None:
        """The dimension that is cut, counted from the front; None if the tensor does not have it."""
        dim = self.dim + tensor.ndim if self.dim < 0 else self.dim
        return dim if 0 <= dim < tensor.ndim else None

    def size(self, tensor: Tensor) -> Any:
        """The size of the dimension that is cut, or of one of its segments; None if there is no such."""
        dim = self.at(tensor)
        if dim is None or self.repeats == 1:
            return None if dim is None else tensor.shape[dim]
        size = tensor.shape[dim]
        return size // self.repeats if isinstance(size, int) and size % self.repeats == 0 else None


@dataclass(frozen=True)
class Cut:
    """A layout, the size of the dimension it was found on (of one segment of it), and whether others may differ."""

    layout: Layout
    size: Any
    multiple: bool = False

    def on(self, entry: Entry, tensor: Tensor) -> Placement | None:
        """The placement of an entry, or None if its dimension cannot be cut like this one."""
        if entry.letter != "S":
            return PARTIAL if entry.letter == "P" else REPLICATE
        dim, size = entry.at(tensor), entry.size(tensor)
        if dim is None or size is None:
            return None
        layout: Layout | None = self.layout
        if not same_size(size, self.size):
            if not (entry.multiple or self.multiple) or not isinstance(size, int) or not isinstance(self.size, int):
                return None
            if size % self.size == 0:
                layout = self.layout.scale(size // self.size)
            elif self.size % size == 0:
                layout = self.layout.unscale(self.size // size)
            else:
                return None
        return Shard.of(dim, layout) if layout is not None and layout.fits(size) else None


@dataclass(frozen=True)
class Line:
    """One line of a table."""

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    local: tuple[str, ...] = field(default=())

    @classmethod
    def parse(cls, text: str) -> Line:
        """The line that a text says; a ValueError quotes what cannot be read."""
        entries, _, names = text.partition(";")
        before, arrow, after = entries.partition("->")
        if not arrow:
            raise ValueError(f"a line of a rule is written 'S(0), R -> S(0)', not {text!r}: there is no arrow")
        line = cls(_entries(before, text), _entries(after, text), tuple(names.replace(",", " ").split()))
        if not all(name.isidentifier() for name in line.local):
            raise ValueError(f"in {text!r}: after the semicolon come names of arguments")
        if all(e.letter == "R" for e in line.inputs):
            raise ValueError(f"{text!r} divides no input: running everything whole is always allowed")
        if line.local and all(e.letter != "S" for e in line.inputs):
            raise ValueError(f"in {text!r}: a number becomes local only where an input is cut")
        if any(e.letter == "S" for e in line.outputs) and all(e.letter != "S" for e in line.inputs):
            raise ValueError(f"in {text!r}: a result is cut, but no input is that says where")
        return line

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"
        return f"{text}; {', '.join(self.local)}" if self.local else text

    def offer(self, call: Call, given: Sequence[InputPlacement]) -> Iterator[Strategy]:
        """The strategies of this line where an input is now as the line wants it."""
        if len(self.inputs) != len(call.inputs) or len(self.outputs) != len(call.outputs):
            return
        if all(e.letter != "S" for e in self.inputs):
            if not draws(call) and any(e.letter == "P" and is_partial(p) for e, p in zip(self.inputs, given)):
                yield Strategy(_sums(self.inputs), _sums(self.outputs))
            return
        entries = [*zip(self.inputs, call.inputs), *zip(self.outputs, call.outputs)]
        plain = [e.size(t) for e, t in entries if e.letter == "S" and not e.multiple]
        if any(not same_size(size, plain[0]) for size in plain):
            return
        for cut in self.cuts(call, given):
            if (any(e.letter == "P" for e in self.outputs) or draws(call)) and cut.layout.has_copies:
                continue  # what lives on two ranks would be counted twice, or drawn twice
            inputs = [cut.on(e, t) for e, t in zip(self.inputs, call.inputs)]
            outputs = [cut.on(e, t) for e, t in zip(self.outputs, call.outputs)]
            shares = self.shares(call, cut)
            if shares is not None and all(p is not None for p in (*inputs, *outputs)):
                localize = partial(localize_shares, shares=shares) if shares else None
                yield Strategy(tuple(inputs), tuple(outputs), localize)  # type: ignore[arg-type]

    def cuts(self, call: Call, given: Sequence[InputPlacement]) -> Iterator[Cut]:
        """How the inputs that this line cuts are cut now."""
        for i, (entry, tensor) in enumerate(zip(self.inputs, call.inputs)):
            dim, size = entry.at(tensor), entry.size(tensor)
            if entry.letter != "S" or dim is None or size is None:
                continue
            for layout in layouts_on(call, given, i, dim):
                if layout.fits(size):
                    yield Cut(layout, size, entry.multiple)

    def shares(self, call: Call, cut: Cut) -> dict[tuple[int, str], tuple[int, ...]] | None:
        """Every rank's share of the named integers, by their position and name; None if one cannot be shared out."""
        found: dict[tuple[int, str], tuple[int, ...]] = {}
        for name in self.local:
            position, value = argument(call, name)
            if type(value) is not int or value < 1 or not isinstance(cut.size, int) or cut.size % value:
                return None
            units = cut.layout.unscale(cut.size // value)
            if units is None or not units.fits(value):
                return None
            each = tuple(units.local_size(value, rank) for rank in range(units.world))
            if not all(each):
                return None
            found[position, name] = each
        return found


def argument(call: Call, name: str) -> tuple[int, Any]:
    """(position, value) of an argument of a call by its name; a ValueError if the operator has none of this name."""
    arguments = call.target._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.name == name:
            return position, call.arg(position, name, argument.default_value)
    raise ValueError(f"{call.target} has no argument {name!r}, but {', '.join(a.name for a in arguments)}")


def localize_shares(
    target: Any, args: list[Any], kwargs: dict[str, Any], rank: int, shares: dict[tuple[int, str], tuple[int, ...]]
) -> tuple[Any, list[Any], dict[str, Any]]:
    """The call of a rank, the named integers replaced by its share of them."""
    for (position, name), each in shares.items():
        if position < len(args):
            args[position] = each[rank]
        else:
            kwargs = {**kwargs, name: each[rank]}
    return target, args, kwargs


def _sums(entries: Sequence[Entry]) -> tuple[Placement, ...]:
    return tuple(PARTIAL if e.letter == "P" else REPLICATE for e in entries)


def _entries(text: str, line: str) -> tuple[Entry, ...]:
    found = []
    for part in text.split(","):
        match = _ENTRY.fullmatch(part.strip())
        if match is None or match[2] == "0":
            raise ValueError(f"in {line!r}: an entry is R, P, S(dim), S(dim x2) or S(dim*), not {part.strip()!r}")
        found.append(Entry(part.strip()[0], int(match[1] or 0), int(match[2] or 1), bool(match[3])))
    return tuple(found)


class Table:
    """A rule made of lines."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = tuple(lines)

    def __call__(self, call: Call, given: Sequence[InputPlacement]) -> Iterator[Strategy]:
        seen: set[Any] = set()
        for line in self.lines:
            for strategy in line.offer(call, given):
                key = strategy.inputs, strategy.outputs
                if key not in seen:
                    seen.add(key)
                    yield strategy

    def __repr__(self) -> str:
        return f"table({', '.join(repr(str(line)) for line in self.lines)})"

    def structures(self, call: Call) -> Structures:
        """For each (input, dimension) that is cut only in segments or whole units: these, as (size, unit) per segment.

        The solver cuts the parameters from which the input is computed in the same way.
        """
        found: Structures = {}
        for line in self.lines:
            for i, (entry, tensor) in enumerate(zip(line.inputs, call.inputs)):
                dim, size = entry.at(tensor), entry.size(tensor)
                if entry.letter != "S" or dim is None or not isinstance(size, int):
                    continue
                values = [argument(call, name)[1] for name in line.local]
                if all(type(v) is int and v > 0 and size % v == 0 for v in values):
                    unit = lcm(*(size // v for v in values))
                    found.setdefault((i, dim), []).append(((size, unit),) * entry.repeats)
        plain = {key for key, structures in found.items() if any(s == ((s[0][0], 1),) for s in structures)}
        return {key: structures for key, structures in found.items() if key not in plain}


def table(*lines: str) -> Rule:
    """A rule from lines such as ``"S(-1), R -> S(-1)"``; what they mean is said above, in this module's docstring.

    A line is offered where one of the inputs already is as the line has it: cut along exactly that dimension, or a sum.
    """
    if not lines:
        raise ValueError("a table needs at least one line")
    return Table(map(Line.parse, lines))
