"""Rules written as tables: one line per way to run the operator on shards.

    table("S(0), R -> S(0)", "S(-1), S(0) -> S(-1)", "P, R -> P")

A line has one entry for every input tensor, an arrow, and one entry for every tensor of the result:

- ``R``: replicated.
- ``P``: partial.
- ``S(d)``: sharded on dimension ``d``; a negative one counts from the end. All sharded dimensions of a line have the
  same size and the same layout. The line does not apply to other sizes.
- ``S(d x2)``: the dimension is packed from two segments (``[gate|up]``), each sharded like the other entries.
- ``S(d*)``: the size may be a multiple of the others', or the reverse: one index of the short dimension stands for
  several consecutive ones of the long.

Integer arguments that count units of the sharded dimension are named after a semicolon, as in
``"S(2), S(2) -> S(2); num_heads"``: each rank gets its share of them, and the dimension is split between units.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import lcm
from typing import Any

from ..compat.torch import schema_of
from ..placement import PARTIAL, REPLICATE, Layout, Placement, Shard
from .base import (
    Call,
    InputPlacement,
    LocalCall,
    Rule,
    Strategy,
    Structures,
    Tensor,
    draws,
    is_partial,
    layouts_on,
    same_size,
)

Shares = dict[tuple[int, str], tuple[int, ...]]
"""For integer arguments, by (position, name): the share of every rank."""

_ENTRY = re.compile(r"R|P|S\(\s*(-?\d+)\s*(?:x\s*(\d+)|(\*))?\s*\)")


@dataclass(frozen=True)
class Entry:
    """The placement of one tensor in a line.

    ``letter`` is R, P or S; ``dim`` is sharded, in each of ``repeats`` segments, or as a ``multiple``.
    """

    letter: str
    dim: int = 0
    repeats: int = 1
    multiple: bool = False

    def __str__(self) -> str:
        if self.letter != "S":
            return self.letter
        return f"S({self.dim}{'*' if self.multiple else ''}{f' x{self.repeats}' if self.repeats > 1 else ''})"

    def at(self, tensor: Tensor) -> int | None:
        """The sharded dimension, counted from the front; None if the tensor does not have it."""
        dim = self.dim + tensor.ndim if self.dim < 0 else self.dim
        return dim if 0 <= dim < tensor.ndim else None

    def size(self, tensor: Tensor) -> Any:
        """The size of the sharded dimension, or of one of its segments; None if there is none of this size."""
        dim = self.at(tensor)
        if dim is None or self.repeats == 1:
            return None if dim is None else tensor.shape[dim]
        size = tensor.shape[dim]
        return size // self.repeats if isinstance(size, int) and size % self.repeats == 0 else None


@dataclass(frozen=True)
class Sharding:
    """How the sharded entries of a line are split.

    The layout, the size of the dimension (or segment) it was found on, and whether other sizes may be multiples of it.
    """

    layout: Layout
    size: Any
    multiple: bool = False

    def on(self, entry: Entry, tensor: Tensor) -> Placement | None:
        """The placement of an entry under this sharding; None if its dimension cannot be split like this."""
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

    def on_all(self, entries: Iterable[Entry], tensors: Iterable[Tensor]) -> tuple[Placement, ...] | None:
        """The placements of several entries; None if one of them cannot be split like this."""
        placements = []
        for entry, tensor in zip(entries, tensors):
            placement = self.on(entry, tensor)
            if placement is None:
                return None
            placements.append(placement)
        return tuple(placements)


@dataclass(frozen=True)
class Line:
    """One line of a table."""

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    local: tuple[str, ...] = field(default=())

    @classmethod
    def parse(cls, text: str) -> Line:
        """Parse a line; a ValueError quotes what is wrong."""
        entries, _, names = text.partition(";")
        before, arrow, after = entries.partition("->")
        if not arrow:
            raise ValueError(f"a line of a rule looks like 'S(0), R -> S(0)'; {text!r} has no arrow")
        line = cls(_entries(before, text), _entries(after, text), tuple(names.replace(",", " ").split()))
        if not all(name.isidentifier() for name in line.local):
            raise ValueError(f"in {text!r}: the words after the semicolon must be names of arguments")
        if all(e.letter == "R" for e in line.inputs):
            raise ValueError(f"{text!r} shards no input: running everything replicated is always allowed")
        if line.local and all(e.letter != "S" for e in line.inputs):
            raise ValueError(f"in {text!r}: an integer can only become local if an input is sharded")
        if any(e.letter == "S" for e in line.outputs) and all(e.letter != "S" for e in line.inputs):
            raise ValueError(f"in {text!r}: a result is sharded, but no input that determines how")
        return line

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"
        return f"{text}; {', '.join(self.local)}" if self.local else text

    def strategies(self, call: Call, placements: Sequence[InputPlacement]) -> Iterator[Strategy]:
        """The strategies of this line, if one of the inputs is placed as the line says."""
        if len(self.inputs) != len(call.inputs) or len(self.outputs) != len(call.outputs):
            return
        if all(e.letter != "S" for e in self.inputs):
            if not draws(call) and any(e.letter == "P" and is_partial(p) for e, p in zip(self.inputs, placements)):
                yield Strategy(_unsharded(self.inputs), _unsharded(self.outputs))
            return
        entries = [*zip(self.inputs, call.inputs), *zip(self.outputs, call.outputs)]
        plain = [e.size(t) for e, t in entries if e.letter == "S" and not e.multiple]
        if any(not same_size(size, plain[0]) for size in plain):
            return
        for sharding in self.shardings(call, placements):
            if (any(e.letter == "P" for e in self.outputs) or draws(call)) and sharding.layout.has_copies:
                continue  # what is on two ranks would be summed twice, or drawn twice
            inputs = sharding.on_all(self.inputs, call.inputs)
            outputs = sharding.on_all(self.outputs, call.outputs)
            shares = self.shares(call, sharding)
            if shares is not None and inputs is not None and outputs is not None:
                localize = partial(localize_shares, shares=shares) if shares else None
                yield Strategy(inputs, outputs, localize)

    def shardings(self, call: Call, placements: Sequence[InputPlacement]) -> Iterator[Sharding]:
        """How those inputs that this line shards are sharded now."""
        for i, (entry, tensor) in enumerate(zip(self.inputs, call.inputs)):
            dim, size = entry.at(tensor), entry.size(tensor)
            if entry.letter != "S" or dim is None or size is None:
                continue
            for layout in layouts_on(call, placements, i, dim):
                if layout.fits(size):
                    yield Sharding(layout, size, entry.multiple)

    def shares(self, call: Call, sharding: Sharding) -> Shares | None:
        """Every rank's share of the named integers; None if the sharding splits a unit or leaves a rank with none."""
        found: Shares = {}
        for name in self.local:
            position, value = argument(call, name)
            if type(value) is not int or value < 1 or not isinstance(sharding.size, int) or sharding.size % value:
                return None
            units = sharding.layout.unscale(sharding.size // value)
            if units is None or not units.fits(value):
                return None
            each = tuple(units.local_size(value, rank) for rank in range(units.world))
            if not all(each):
                return None
            found[position, name] = each
        return found


def argument(call: Call, name: str) -> tuple[int, Any]:
    """(position, value) of an argument of a call by its name; a ValueError if the operator has no such argument."""
    arguments = schema_of(call.target).arguments
    for position, argument in enumerate(arguments):
        if argument.name == name:
            return position, call.arg(position, name, argument.default_value)
    raise ValueError(f"{call.target} has no argument {name!r}; it has {', '.join(a.name for a in arguments)}")


def localize_shares(target: Any, args: list[Any], kwargs: dict[str, Any], rank: int, shares: Shares) -> LocalCall:
    """The call of a rank: the named integers replaced by its share of them."""
    for (position, name), each in shares.items():
        if position < len(args):
            args[position] = each[rank]
        else:
            kwargs = {**kwargs, name: each[rank]}
    return target, args, kwargs


def _unsharded(entries: Sequence[Entry]) -> tuple[Placement, ...]:
    """The placements of entries that are all partial or replicated."""
    return tuple(PARTIAL if e.letter == "P" else REPLICATE for e in entries)


def _entries(text: str, line: str) -> tuple[Entry, ...]:
    """Parse one side of a line."""
    found = []
    for part in text.split(","):
        match = _ENTRY.fullmatch(part.strip())
        if match is None or match[2] == "0":
            raise ValueError(f"in {line!r}: an entry is R, P, S(dim), S(dim x2) or S(dim*), not {part.strip()!r}")
        found.append(Entry(part.strip()[0], int(match[1] or 0), int(match[2] or 1), bool(match[3])))
    return tuple(found)


class Table:
    """A rule that consists of lines."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = tuple(lines)

    def __call__(self, call: Call, placements: Sequence[InputPlacement]) -> Iterator[Strategy]:
        """The strategies of all lines, each once."""
        seen: set[Any] = set()
        for line in self.lines:
            for strategy in line.strategies(call, placements):
                key = strategy.inputs, strategy.outputs
                if key not in seen:
                    seen.add(key)
                    yield strategy

    def __repr__(self) -> str:
        return f"table({', '.join(repr(str(line)) for line in self.lines)})"

    def structures(self, call: Call) -> Structures:
        """The inputs' dimensions that can only be split in segments or units: (size, unit) of each segment.

        The solver splits the parameters from which such an input is computed in the same way.
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
    """A rule from lines such as ``"S(-1), R -> S(-1)"``; see the docstring of this module for the syntax.

    A line applies where one of the inputs is already placed as the line says: sharded on exactly that dimension, or
    partial.
    """
    if not lines:
        raise ValueError("a table needs at least one line")
    return Table(map(Line.parse, lines))
