"""Finding sound strategies by trial and error, without any knowledge of the operator.

The operator runs on shards under every combination of input placements; where some placement of the outputs gives the
unsharded result, that is a candidate. Candidates are lines of a table (:mod:`paraxis.rules.table`), which a check under
many layouts confirms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Any

import torch

from ...compat.torch import overload_of, schema_or_none
from ...placement import REPLICATE, SHARED, Layout, Placement
from ..base import Call, Sample, Strategy, Tensor, draws
from ..registry import accepts_unplaced, rule_for
from ..table import Entry, Line, Sharding, argument, localize_shares, table
from .check import Case, Report, check_cases, input_placements
from .run import Trial

REPLICATED, PARTIAL = Entry("R"), Entry("P")
REPEATS = (2, 3)
"""Numbers of segments to try for packed dimensions."""
MAX_COMBINATIONS = 6000
"""How many combinations of input entries are tried."""
MAX_OUTPUTS = 64
"""How many combinations of output entries are looked at for one of the inputs."""


def candidates(sample: Sample, world: int = 2) -> list[Line]:
    """The lines that hold for one call on ``world`` ranks, with even splits and dimensions counted from the front.

    Without lines whose results are all replicated, and without those that shard an input where a replicated one gives
    the same results.
    """
    trial = Trial.of(sample.target, sample.args, sample.kwargs, world)
    if draws(trial.call):
        return []  # values cannot be compared
    values: list[Line] = []  # right in values; with a replicated result it may still be wrong in gradients
    found: list[Line] = []
    for inputs in _combinations(trial.call):
        for local in _local_options(trial.call):
            attempt = _Attempt.of(trial.call, inputs, local, world)
            if attempt is None:
                continue
            for line in _lines(trial, attempt):
                values.append(line)
                if _problem(trial, line, attempt.sharding) is None:
                    found.append(line)
    return [
        line
        for line in found
        if not any(_implies(other, line) for other in found)
        and not (_is_odd(line) and any(_is_part(other, line) for other in values))
    ]


def _combinations(call: Call) -> Iterator[tuple[Entry, ...]]:
    """Entries for all inputs: replicated, partial, sharded on a dimension, sharded in each of some segments."""
    for repeats in (REPEATS, ()):
        options = [_options(t, repeats) for t in call.inputs]
        if math.prod(len(o) for o in options) <= MAX_COMBINATIONS:
            break
    for inputs in islice(product(*options), MAX_COMBINATIONS):
        if any(e != REPLICATED for e in inputs):
            yield inputs


def _options(tensor: Tensor, repeats: Iterable[int]) -> list[Entry]:
    """Entries to try for a tensor."""
    found = [REPLICATED]
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:  # partial indices would be out of range
        found.append(PARTIAL)
    for d, size in enumerate(tensor.shape):
        found += [Entry("S", d, r) for r in (1, *repeats) if size % r == 0 and size // r >= 2]
    return found


def _local_options(call: Call) -> list[tuple[str, ...]]:
    """Which integers to make local: none of them, each alone, all together."""
    schema = schema_or_none(call.target)
    names = [a.name for a in schema.arguments if str(a.type) in ("int", "SymInt")] if schema is not None else []
    names = [name for name in names if type(value := argument(call, name)[1]) is int and value >= 2]
    alone = [(name,) for name in names]
    return [(), *alone, tuple(names)] if len(names) > 1 else [(), *alone]


@dataclass(frozen=True)
class _Attempt:
    """Inputs and local integers to try, and how the sharded inputs are split; ``size`` is None if none is sharded."""

    inputs: tuple[Entry, ...]
    local: tuple[str, ...]
    sharding: Sharding
    size: int | None

    @classmethod
    def of(cls, call: Call, inputs: tuple[Entry, ...], local: tuple[str, ...], world: int) -> _Attempt | None:
        """Split the sharded dimensions evenly, longer ones as multiples of the shortest; None if that is impossible."""
        sizes = [e.size(t) for e, t in zip(inputs, call.inputs) if e.letter == "S"]
        if not sizes:
            return None if local else cls(inputs, local, Sharding(Layout.full(world), 1), None)
        size = min(sizes)
        layout = _even_in_units(call, size, local, world)
        if layout is None or any(n % size for n in sizes):
            return None
        inputs = tuple(_multiple(e, t, size) for e, t in zip(inputs, call.inputs))
        return cls(inputs, local, Sharding(layout, size, multiple=True), size)

    def run(self, trial: Trial) -> list[list[torch.Tensor]] | None:
        """The results of every rank; None if the call cannot be made like this, or does not run."""
        call = trial.call
        shares = Line(self.inputs, (), self.local).shares(call, self.sharding)
        placements = self.sharding.on_all(self.inputs, call.inputs)
        if shares is None or placements is None:
            return None
        try:
            results = trial.run_all(placements, partial(localize_shares, shares=shares))
        except Exception:
            return None
        return results if all(len(r) == len(call.outputs) for r in results) else None

    def entries_of(self, trial: Trial, output: int, parts: list[torch.Tensor]) -> list[Entry]:
        """The entries for an output under which what the ranks computed is the unsharded result."""
        tensor = trial.call.outputs[output]
        options = [REPLICATED, *_options(tensor, REPEATS if self.size is not None else ()), PARTIAL]
        if self.size is None:
            options = [e for e in options if e.letter != "S"]
        options = [_multiple(e, tensor, self.size) for e in options]
        placed = ((e, self.sharding.on(e, tensor)) for e in dict.fromkeys(options))
        return [e for e, p in placed if p is not None and trial.difference(output, parts, p) is None]


def _lines(trial: Trial, attempt: _Attempt) -> Iterator[Line]:
    """The lines with these inputs that are right in values. The call runs once, whatever the outputs are."""
    results = attempt.run(trial)
    if results is None:
        return
    fitting = [attempt.entries_of(trial, i, [r[i] for r in results]) for i in range(len(trial.call.outputs))]
    for outputs in islice(product(*fitting), MAX_OUTPUTS):
        line = Line(attempt.inputs, outputs, attempt.local)
        if any(e != REPLICATED for e in outputs) and not _is_redundant(line):
            yield line


def _is_redundant(line: Line) -> bool:
    """Whether another line says the same, or this one is right by chance only."""
    sharded = [e for e in (*line.inputs, *line.outputs) if e.letter == "S"]
    if sharded and min(e.repeats for e in sharded) > 1:
        return True  # all are packed: the line without segments says it
    # Segments that are multiples of other sizes: right only where values happen to be equal.
    return any(e.repeats > 1 for e in sharded) and any(e.multiple for e in sharded)


def _multiple(entry: Entry, tensor: Tensor, size: int | None) -> Entry:
    """The entry, marked as a multiple if its dimension has another size."""
    return replace(entry, multiple=entry.letter == "S" and entry.repeats == 1 and entry.size(tensor) != size)


def _even_in_units(call: Call, size: int, local: Sequence[str], world: int) -> Layout | None:
    """An even layout that splits none of the units that the named integers count; None if there are too few."""
    unit = 1
    for name in local:
        value = argument(call, name)[1]
        if size % value:
            return None
        unit = math.lcm(unit, size // value)
    return Layout.even(size, world, unit) if size // unit >= world else None


def _problem(trial: Trial, line: Line, sharding: Sharding) -> str | None:
    """What is wrong with the strategies of a line, if anything."""
    placements = [sharding.on(e, t) or REPLICATE for e, t in zip(line.inputs, trial.call.inputs)]
    strategies = list(line.strategies(trial.call, placements))
    if not strategies:
        return "the line does not apply"
    return next((p for s in strategies if (p := trial.problem(s)) is not None), None)


def _implies(one: Line, other: Line) -> bool:
    """Whether ``one`` has the same results as ``other`` and needs less."""
    less = all(a in (b, REPLICATED) for a, b in zip(one.inputs, other.inputs))
    return one != other and one.outputs == other.outputs and less and set(one.local) <= set(other.local)


def _is_odd(line: Line) -> bool:
    """Whether the line relates what is usually unrelated: other sizes, segments, partial and sharded tensors."""
    entries = [e for e in (*line.inputs, *line.outputs) if e != REPLICATED]
    return any(e.multiple or e.repeats > 1 for e in entries) or len({e.letter for e in entries}) > 1


def _is_part(one: Line, other: Line) -> bool:
    """Whether ``other`` is ``one`` with more entries, which do not affect the results."""
    pairs = [*zip(one.inputs, other.inputs), *zip(one.outputs, other.outputs)]
    plain = [(a, Entry(b.letter, b.dim)) for a, b in pairs]
    return any(a != b for a, b in plain) and all(a in (b, REPLICATED) for a, b in plain)


def confirm(lines: Sequence[Line], samples: Sequence[Sample], worlds: Sequence[int]) -> list[Line]:
    """Those of the lines that are right for all calls, whatever the layout."""
    cases = [Case.of(sample, world) for sample in samples for world in worlds]
    for case in cases:  # one by one: a line that fails in the first costs no more
        if lines and check_cases([case], table(*map(str, lines))).wrong:
            lines = [line for line in lines if not check_cases([case], table(str(line))).wrong]
    return list(lines)


def report_on(lines: Sequence[Line], samples: Sequence[Sample], worlds: Sequence[int]) -> Report:
    """The report of checking a table of these lines."""
    return check_cases([Case.of(sample, world) for sample in samples for world in worlds], table(*map(str, lines)))


def missing(target: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Sound strategies for a call, as lines of a table, that the rule of its operator does not have.

    Found by trial and error on two ranks, and confirmed on two and three.
    """
    target = overload_of(target)
    sample = Sample(target, args, kwargs)
    trial = Trial.of(target, args, kwargs, 2)
    lines = confirm(candidates(sample), [sample], worlds=(2, 3))
    rule, free = rule_for(target), accepts_unplaced(target)
    found = []
    for line in lines:
        sound = [s for p in input_placements(trial.call, 2) for s in line.strategies(trial.call, p)][:1]
        inputs = [*input_placements(trial.call, 2, free), *(s.inputs for s in sound)]
        existing = {_key(s) for p in inputs for s in (rule(trial.call, p) if rule is not None else ())}
        if any(_key(s) not in existing for s in sound):
            found.append(str(line))
    return found


def _key(strategy: Strategy) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """What makes two strategies the same: shared and replicated inputs are equal here."""

    def plain(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(REPLICATE if p == SHARED else p for p in placements)

    return plain(strategy.inputs), plain(strategy.outputs)
