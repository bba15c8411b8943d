"""Finding sound placements by trying, without any knowledge of the operator.

Every combination of input placements is cut, run and put together in every way; what gives the whole result is a
candidate. Candidates are lines of a table (:mod:`paraxis.rules.table`), which a check under many layouts confirms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any

from ...placement import REPLICATE, SHARED, Layout, Placement
from ..base import Call, Sample, Strategy, Tensor, accepts_unplaced, draws, rule_for
from ..table import Cut, Entry, Line, argument, localize_shares, table
from .check import Bench, Report, check_on, givens
from .run import Trial

WHOLE, SUM = Entry("R"), Entry("P")
REPEATS = (2, 3)
MAX_COMBINATIONS = 6000


def candidates(sample: Sample, world: int = 2) -> list[Line]:
    """The lines that hold for one call on ``world`` ranks, dimensions cut evenly and counted from the front.

    Left out are lines that divide no result, and those that divide an input for which whole ones would do as well.
    """
    trial = Trial.of(sample.target, sample.args, sample.kwargs, world)
    if draws(trial.call):
        return []  # values cannot be compared
    values: list[Line] = []  # right in values; a line that leaves a result whole may still be wrong in gradients
    found: list[Line] = []
    for inputs in _combinations(trial.call):
        for local in _local_options(trial.call):
            for line, problem in _lines(trial, inputs, local, world):
                values.append(line)
                if problem is None:
                    found.append(line)
    return [
        line
        for line in found
        if not any(_implies(other, line) for other in found)
        and not (_is_odd(line) and any(_is_part(other, line) for other in values))
    ]


def _combinations(call: Call) -> Iterator[tuple[Entry, ...]]:
    """Placements of all inputs: whole, a term of a sum, cut along a dimension, cut in each of some segments."""
    for repeats in (REPEATS, ()):
        options = [_options(t, repeats) for t in call.inputs]
        if math.prod(len(o) for o in options) <= MAX_COMBINATIONS:
            break
    for inputs in islice(product(*options), MAX_COMBINATIONS):
        if any(e != WHOLE for e in inputs):
            yield inputs


def _options(tensor: Tensor, repeats: Iterable[int]) -> list[Entry]:
    found = [WHOLE]
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:  # terms of indices would point anywhere
        found.append(SUM)
    for d, size in enumerate(tensor.shape):
        found += [Entry("S", d, r) for r in (1, *repeats) if size % r == 0 and size // r >= 2]
    return found


def _local_options(call: Call) -> list[tuple[str, ...]]:
    """Which integers might count something: none of them, each alone, all together."""
    schema = getattr(call.target, "_schema", None)
    names = [a.name for a in schema.arguments if str(a.type) in ("int", "SymInt")] if schema is not None else []
    names = [name for name in names if type(value := argument(call, name)[1]) is int and value >= 2]
    alone = [(name,) for name in names]
    return [(), *alone, tuple(names)] if len(names) > 1 else [(), *alone]


def _lines(
    trial: Trial, inputs: tuple[Entry, ...], local: tuple[str, ...], world: int
) -> Iterator[tuple[Line, str | None]]:
    """The lines with these inputs that hold, and what is wrong with them beside their values.

    The call is run once; then it is seen what the results are shards of.
    """
    call = trial.call
    sizes = [e.size(t) for e, t in zip(inputs, call.inputs) if e.letter == "S"]
    size = min(sizes, default=None)
    if size is None:
        if local:
            return
        cut = Cut(Layout.full(world), 1)
    else:
        if any(n % size for n in sizes):
            return
        inputs = tuple(_multiple(e, t, size) for e, t in zip(inputs, call.inputs))
        layout = _in_units(call, size, local, world)
        if layout is None:
            return
        cut = Cut(layout, size, multiple=True)
    shares = Line(inputs, (), local).shares(call, cut)
    placed = [cut.on(e, t) for e, t in zip(inputs, call.inputs)]
    if shares is None or any(p is None for p in placed):
        return
    try:
        results = trial.carry_out(placed, partial(localize_shares, shares=shares))  # type: ignore[arg-type]
    except Exception:
        return
    if any(len(r) != len(call.outputs) for r in results):
        return
    fitting = []
    for i, tensor in enumerate(call.outputs):
        parts = [r[i] for r in results]
        options = [WHOLE, *_options(tensor, REPEATS if size is not None else ())]
        options = [_multiple(e, tensor, size) for e in options if size is not None or e.letter != "S"]
        ways = ((e, cut.on(e, tensor)) for e in dict.fromkeys([*options, SUM]))
        fitting.append([e for e, p in ways if p is not None and trial.difference(i, parts, p) is None])
    for outputs in islice(product(*fitting), 64):
        line = Line(inputs, outputs, local)
        cuts = [e for e in (*inputs, *outputs) if e.letter == "S"]
        if cuts and min(e.repeats for e in cuts) > 1:
            continue  # all are packed: the plain line says it
        if any(e.repeats > 1 for e in cuts) and any(e.multiple for e in cuts):
            continue  # segments that stand for multiples: right by chance, where values happen to be alike
        if any(e != WHOLE for e in outputs):
            yield line, _problem(trial, line, cut)


def _multiple(entry: Entry, tensor: Tensor, size: int | None) -> Entry:
    return replace(entry, multiple=entry.letter == "S" and entry.repeats == 1 and entry.size(tensor) != size)


def _in_units(call: Call, size: int, local: Sequence[str], world: int) -> Layout | None:
    """An even layout that cuts between the whole units of which the named integers are the numbers."""
    unit = 1
    for name in local:
        value = argument(call, name)[1]
        if size % value:
            return None
        unit = math.lcm(unit, size // value)
    return Layout.even(size, world, unit) if size // unit >= world else None


def _problem(trial: Trial, line: Line, cut: Cut) -> str | None:
    given = [cut.on(e, t) or REPLICATE for e, t in zip(line.inputs, trial.call.inputs)]
    offered = list(line.offer(trial.call, given))
    return next((p for s in offered if (p := trial.problem(s)) is not None), None) if offered else "not offered"


def _implies(one: Line, other: Line) -> bool:
    """Whether ``one`` gives the same as ``other`` and asks for less."""
    less = all(a in (b, WHOLE) for a, b in zip(one.inputs, other.inputs))
    return one != other and one.outputs == other.outputs and less and set(one.local) <= set(other.local)


def _is_odd(line: Line) -> bool:
    """Whether the line relates things that are usually unrelated: other sizes, segments, sums and shards."""
    entries = [e for e in (*line.inputs, *line.outputs) if e != WHOLE]
    return any(e.multiple or e.repeats > 1 for e in entries) or len({e.letter for e in entries}) > 1


def _is_part(one: Line, other: Line) -> bool:
    """Whether ``other`` is ``one`` and something else beside it, of which the results are independent."""
    pairs = [*zip(one.inputs, other.inputs), *zip(one.outputs, other.outputs)]
    plain = [(a, Entry(b.letter, b.dim)) for a, b in pairs]
    return any(a != b for a, b in plain) and all(a in (b, WHOLE) for a, b in plain)


def confirm(lines: Sequence[Line], samples: Sequence[Sample], worlds: Sequence[int]) -> list[Line]:
    """Those of the lines that are right for all calls, whatever the layout."""
    benches = [Bench.of(sample, world) for sample in samples for world in worlds]
    for bench in benches:  # one after the other, so that what is wrong on the first costs no more
        if lines and check_on([bench], table(*map(str, lines))).wrong:
            lines = [line for line in lines if not check_on([bench], table(str(line))).wrong]
    return list(lines)


def report_on(lines: Sequence[Line], samples: Sequence[Sample], worlds: Sequence[int]) -> Report:
    """What checking a table of these lines says."""
    return check_on([Bench.of(sample, world) for sample in samples for world in worlds], table(*map(str, lines)))


def missing(target: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Sound placements of a call, found by trying, that the rule of its operator does not offer.

    They are looked for on two ranks and confirmed on two and three.
    """
    target = getattr(target, "_opoverload", target)
    sample = Sample(target, args, kwargs)
    trial = Trial.of(target, args, kwargs, 2)
    lines = confirm(candidates(sample), [sample], worlds=(2, 3))
    rule, free = rule_for(target), accepts_unplaced(target)
    found = []
    for line in lines:
        wanted = [s for given in givens(trial.call, 2) for s in line.offer(trial.call, given)][:1]
        asked = [*givens(trial.call, 2, free), *(s.inputs for s in wanted)]
        offered = {_key(s) for given in asked for s in (rule(trial.call, given) if rule is not None else ())}
        if any(_key(s) not in offered for s in wanted):
            found.append(str(line))
    return found


def _key(strategy: Strategy) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    plain = lambda placed: tuple(REPLICATE if p == SHARED else p for p in placed)  # noqa: E731
    return plain(strategy.inputs), plain(strategy.outputs)
