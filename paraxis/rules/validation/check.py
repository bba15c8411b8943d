"""Checking a rule: ask it under many placements, carry out what it offers, and say what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from ...errors import UnsoundRuleError
from ...placement import PARTIAL, REPLICATE, SHARED, Layout, Partial, Placement, Shard
from ..base import UNPLACED, Call, InputPlacement, Rule, Sample, Samples, Strategy, accepts_unplaced, draws, rule_for
from .gradients import gradient_problem
from .run import Trial

WORLDS = (2, 3, 4)
"""Numbers of ranks on which a rule is checked: sizes that divide, that do not, and fewer units than ranks."""

NO_VALUE = {"aten::empty_like"}
"""Operators whose results are only a shape."""


@dataclass
class Report:
    """What was tried."""

    checked: set[tuple[tuple[str, ...], tuple[str, ...], str]] = field(default_factory=set)
    """Strategies that were carried out and are right: placements of inputs, of outputs, kind."""
    wrong: list[str] = field(default_factory=list)
    sharded: int = 0
    """How many of the strategies that were right had a tensor that is really divided, on each number of ranks."""
    calls: int = 0

    def add(self, other: Report) -> None:
        """Take in what was found for another call."""
        self.checked |= other.checked
        self.wrong += other.wrong
        self.sharded += other.sharded
        self.calls += other.calls


# -- placements to try ---------------------------------------------------------------------------------------------


def layouts(size: int, world: int) -> list[Layout]:
    """Ways to cut a dimension of this size, from the plain to the odd; none that every rank holds whole."""
    found: list[Layout] = []
    if size < 2:
        return found
    if size >= world or world % size == 0:
        found.append(Layout.even(size, world))  # uneven, or with copies, as the size has it
    if size >= 4:
        a = size // 2  # packed from two segments, in general unequal ones
        if min(a, size - a) >= world or world % a == 0:
            parts = [(n, Layout.even(n, world)) for n in (a, size - a) if n >= world or world % n == 0]
            if len(parts) == 2:
                found.append(Layout.concat(parts))
        found.append(Layout.concat([(2, Layout.full(world)), (size - 2, Layout.even(size - 2, world))])
                     if size - 2 >= world else Layout.even(size, world))  # fmt: skip
    if size % (2 * world) == 0:
        found.append(Layout.even(2 * world, world))  # interleaved
    if size % 3 == 0 and size // 3 >= world:
        found.append(Layout.even(size // 3, world))  # packed from three equal segments
    if world == 4 and size % 2 == 0:
        found.append(Layout.even(size, 4, unit=size // 2))  # two groups on two ranks each
    found.append(Layout.of(size, [[(0, size)], *[[]] * (world - 1)]))  # all of it on the first rank
    found.append(Layout.of(size, [[(1, size)], [(0, 1)], *[[(0, 2)]] * (world - 2)]))
    return [x for x in dict.fromkeys(found) if not x.is_full]


def placements(shape: Sequence[int], world: int) -> list[Placement]:
    """Boxes with one sharded dimension, some with two, and the shared one."""
    found: list[Placement] = [Shard.of(d, x) for d, n in enumerate(shape) for x in layouts(n, world)]
    pairs = [(a, b) for a in range(len(shape)) for b in range(a + 1, len(shape))]
    for a, b in pairs:
        if world == 4 and shape[a] % 2 == 0 and shape[b] % 2 == 0:
            outer = Layout.even(shape[a], 4, unit=shape[a] // 2)
            half = shape[b] // 2
            inner = Layout.of(shape[b], [[(r % 2 * half, (r % 2 + 1) * half)] for r in range(4)])
            found.append(Shard.of({a: outer, b: inner}))
    return [*found, SHARED]


def givens(call: Call, world: int, free: bool = False, limit: int = 400) -> list[tuple[InputPlacement, ...]]:
    """Combinations of input placements: one placed and the others whole, all alike, and some mixtures."""
    per_input = [placements(t.shape, world) for t in call.inputs]
    whole: list[InputPlacement] = [REPLICATE] * len(call.inputs)
    found: list[tuple[InputPlacement, ...]] = []
    for i, options in enumerate(per_input):
        for p in [*options, PARTIAL]:
            found.append(tuple([*whole[:i], p, *whole[i + 1 :]]))
    if len(call.inputs) > 1:
        found.append((PARTIAL,) * len(call.inputs))
        for p in dict.fromkeys(p for options in per_input for p in options):
            found.append(tuple(p if p in o else REPLICATE for o in per_input))
        random = torch.Generator().manual_seed(len(call.inputs))
        for _ in range(40):
            picks = [torch.randint(len(o), (), generator=random) for o in per_input]
            found.append(tuple(o[k] for o, k in zip(per_input, picks)))
    if free:
        for i, t in enumerate(call.inputs):
            for d, n in enumerate(t.shape):
                call.layouts[i, d] = tuple(layouts(n, world))
        bound = [[REPLICATE, PARTIAL, *per_input[i][:6]] if i == 0 else [UNPLACED] for i in range(len(call.inputs))]
        found += list(product(*bound))
        found += [tuple(UNPLACED if j == i else REPLICATE for j in range(len(whole))) for i in range(len(whole))]
    return list(dict.fromkeys(found))[:limit]


# -- asking the rule -----------------------------------------------------------------------------------------------


def check(
    target: Any,
    *args: Any,
    worlds: Sequence[int] = WORLDS,
    values: bool | None = None,
    rule: Rule | None = None,
    free: bool | None = None,
    skip_kinds: Sequence[str] = (),
    gradients: Sequence[int] = (),
    **kwargs: Any,
) -> Report:
    """Try every strategy that a rule offers for a call: the registered one of ``target``, or ``rule``.

    The values are compared unless the call draws random numbers or has none. ``skip_kinds``: strategies that are
    carried out by a parallel layer and not by the operator. ``gradients``: numbers of ranks on which the gradients of
    the inputs are compared too.
    """
    use = rule or rule_for(target)
    if use is None:
        raise ValueError(f"{target} has no rule to check")
    free = accepts_unplaced(target) if free is None else free
    benches = [Bench.of(Sample(target, args, kwargs), world, free) for world in worlds]
    report = check_on(benches, use, values, skip_kinds, gradients)
    report.calls = 1
    return report


@dataclass(eq=False)
class Bench:
    """A call on some number of ranks, and all the placements under which a rule is asked about it."""

    trial: Trial
    givens: list[tuple[InputPlacement, ...]]

    @classmethod
    def of(cls, sample: Sample, world: int, free: bool = False) -> Bench:
        """Runs the call once."""
        trial = Trial.of(sample.target, sample.args, sample.kwargs, world)
        return cls(trial, givens(trial.call, world, free))


def check_on(
    benches: Iterable[Bench],
    rule: Rule,
    values: bool | None = None,
    skip_kinds: Sequence[str] = (),
    gradients: Sequence[int] = (),
) -> Report:
    """Try what a rule offers on prepared calls."""
    report = Report()
    for bench in benches:
        trial, call = bench.trial, bench.trial.call
        compare = values if values is not None else not (draws(call) or _name(call.target) in NO_VALUE)
        tried: set[Any] = set()
        for given in bench.givens:
            try:
                offered = list(rule(call, given))
            except Exception as error:
                shown = ", ".join(map(str, given))
                report.wrong.append(f"{call.target} on {call.world} ranks, {shown}: the rule raised {error!r}")
                continue
            for strategy in offered:
                key = (strategy.inputs, strategy.outputs)
                if strategy.kind not in skip_kinds and key not in tried:
                    tried.add(key)
                    _try(trial, strategy, compare, call.world in gradients, report)
    return report


def _try(trial: Trial, strategy: Strategy, values: bool, gradients: bool, report: Report) -> None:
    found = trial.problem(strategy, values)
    if found is None and values and gradients and trial.fits(strategy):
        found = gradient_problem(trial, strategy)
    inputs, outputs = tuple(map(str, strategy.inputs)), tuple(map(str, strategy.outputs))
    if found is not None:
        shapes = ", ".join("×".join(map(str, t.shape)) or "scalar" for t in trial.call.inputs)
        report.wrong.append(
            f"{trial.call.target} of {shapes} on {trial.call.world} ranks, "
            f"{', '.join(inputs)} -> {', '.join(outputs)}: {found}"
        )
    elif trial.fits(strategy):
        report.checked.add((inputs, outputs, strategy.kind))
        report.sharded += any(divides(p) for p in (*strategy.inputs, *strategy.outputs))


def divides(placement: Placement) -> bool:
    """Whether the ranks hold different things."""
    return isinstance(placement, Partial) or (isinstance(placement, Shard) and bool(placement.layouts))


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else ""


def prove(targets: Sequence[Any], rule: Rule, samples: Samples, free: bool = False) -> Report:
    """Check a rule on sample calls of all its operators. Raises :class:`UnsoundRuleError` unless it is right on all
    of them, and divides something on one of each operator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _prove(targets, rule, sample_calls(samples), free)


def _prove(targets: Sequence[Any], rule: Rule, calls: Sequence[Sample], free: bool) -> Report:
    total = Report()
    for target in targets:
        mine = [sample for sample in calls if sample.target is target]
        if not mine:
            raise UnsoundRuleError(f"there is no sample call of {target}: nothing shows that its rule is right")
        report = Report()
        for sample in mine:
            report.add(check(target, *sample.args, rule=rule, free=free, gradients=WORLDS[:2], **sample.kwargs))
        if report.wrong:
            more = f" (and {len(report.wrong) - 1} more)" if len(report.wrong) > 1 else ""
            raise UnsoundRuleError(f"the rule is wrong for {report.wrong[0]}{more}")
        if not report.sharded:
            raise UnsoundRuleError(
                f"the rule of {target} offered no strategy with a sharded tensor on {len(mine)} sample calls, "
                f"so that nothing shows that it is right; give calls that it divides"
            )
        total.add(report)
    return total


def sample_calls(samples: Samples) -> list[Sample]:
    """The calls that were given: themselves, by a function, or as the name of a family."""
    if isinstance(samples, str):
        from .samples import FAMILIES

        if samples not in FAMILIES:
            raise ValueError(f"there is no family of samples called {samples!r}; give calls: samples=[sample(op, ...)]")
        return FAMILIES[samples]()
    found = list(samples() if callable(samples) else samples)
    for sample in found:
        if not isinstance(sample, Sample):
            raise TypeError(f"samples are made by paraxis.rules.sample(op, *args, **kwargs), not {sample!r}")
    return [sample._replace(target=_overload(sample.target)) for sample in found]


def _overload(target: Any) -> Any:
    target = getattr(target, "_opoverload", target)
    return target.default if isinstance(target, torch._ops.OpOverloadPacket) else target
