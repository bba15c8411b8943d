"""Checking a rule: call it with many input placements, run its strategies on shards, and report what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from ...compat.torch import OpOverloadPacket, overload_of
from ...errors import UnsoundRuleError
from ...placement import PARTIAL, REPLICATE, SHARED, Layout, Partial, Placement, Shard
from ..base import UNPLACED, Call, InputPlacement, Rule, Sample, Samples, Strategy, draws
from ..registry import accepts_unplaced, rule_for
from .gradients import gradient_problem
from .run import Trial
from .samples import FAMILIES

WORLDS = (2, 3, 4)
"""Numbers of ranks: for dimensions that divide, that do not, and with fewer units than ranks."""

NO_VALUE = {"empty_like"}
"""Operators whose results have a shape but no defined values."""


@dataclass
class Report:
    """What was checked."""

    checked: set[tuple[tuple[str, ...], tuple[str, ...], str]] = field(default_factory=set)
    """Strategies that were run and are right: placements of inputs, of outputs, kind."""
    wrong: list[str] = field(default_factory=list)
    sharded: int = 0
    """How many right strategies had a sharded or partial tensor, all numbers of ranks together."""
    calls: int = 0

    def add(self, other: Report) -> None:
        """Add the results of another call."""
        self.checked |= other.checked
        self.wrong += other.wrong
        self.sharded += other.sharded
        self.calls += other.calls


# -- input placements ----------------------------------------------------------------------------------------------


def layouts(size: int, world: int) -> list[Layout]:
    """Layouts of a dimension of this size, from the common to the odd, without the full one."""
    found: list[Layout] = []
    if size < 2:
        return found
    if size >= world or world % size == 0:
        found.append(Layout.even(size, world))  # uneven, or with copies, depending on the size
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
    """Shards of one dimension, some of two, and the shared one."""
    found: list[Placement] = [Shard.of(d, x) for d, n in enumerate(shape) for x in layouts(n, world)]
    pairs = [(a, b) for a in range(len(shape)) for b in range(a + 1, len(shape))]
    for a, b in pairs:
        if world == 4 and shape[a] % 2 == 0 and shape[b] % 2 == 0:
            outer = Layout.even(shape[a], 4, unit=shape[a] // 2)
            half = shape[b] // 2
            inner = Layout.of(shape[b], [[(r % 2 * half, (r % 2 + 1) * half)] for r in range(4)])
            found.append(Shard.of({a: outer, b: inner}))
    return [*found, SHARED]


def input_placements(call: Call, world: int, free: bool = False, limit: int = 400) -> list[tuple[InputPlacement, ...]]:
    """Combinations of input placements: one input placed and the others replicated, all the same, and random ones."""
    per_input = [placements(t.shape, world) for t in call.inputs]
    count = len(call.inputs)
    found: list[tuple[InputPlacement, ...]] = []
    for i, options in enumerate(per_input):
        for p in [*options, PARTIAL]:
            found.append(tuple(p if j == i else REPLICATE for j in range(count)))
    if count > 1:
        found.append((PARTIAL,) * count)
        for p in dict.fromkeys(p for options in per_input for p in options):
            found.append(tuple(p if p in o else REPLICATE for o in per_input))
        random = torch.Generator().manual_seed(count)
        for _ in range(40):
            picks = [torch.randint(len(o), (), generator=random) for o in per_input]
            found.append(tuple(o[k] for o, k in zip(per_input, picks)))
    if free:
        for i, t in enumerate(call.inputs):
            for d, n in enumerate(t.shape):
                call.layouts[i, d] = tuple(layouts(n, world))
        bound = [[REPLICATE, PARTIAL, *per_input[i][:6]] if i == 0 else [UNPLACED] for i in range(count)]
        found += list(product(*bound))
        found += [tuple(UNPLACED if j == i else REPLICATE for j in range(count)) for i in range(count)]
    return list(dict.fromkeys(found))[:limit]


# -- checking ------------------------------------------------------------------------------------------------------


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
    """Check every strategy of a rule for a call: of the registered rule of ``target``, or of ``rule``.

    Values are compared unless the call draws random numbers or has none (``values`` decides otherwise). ``skip_kinds``:
    strategies of these kinds without a local call are skipped, because a parallel layer runs them. ``gradients``:
    numbers of ranks on which the gradients of the inputs are compared too.
    """
    use = rule or rule_for(target)
    if use is None:
        raise ValueError(f"{target} has no rule to check")
    free = accepts_unplaced(target) if free is None else free
    cases = [Case.of(Sample(target, args, kwargs), world, free) for world in worlds]
    report = check_cases(cases, use, values, skip_kinds, gradients)
    report.calls = 1
    return report


@dataclass(eq=False)
class Case:
    """A call on a number of ranks, and the input placements for which a rule is checked."""

    trial: Trial
    placements: list[tuple[InputPlacement, ...]]

    @classmethod
    def of(cls, sample: Sample, world: int, free: bool = False) -> Case:
        """Run the call once, for its result."""
        trial = Trial.of(sample.target, sample.args, sample.kwargs, world)
        return cls(trial, input_placements(trial.call, world, free))


def check_cases(
    cases: Iterable[Case],
    rule: Rule,
    values: bool | None = None,
    skip_kinds: Sequence[str] = (),
    gradients: Sequence[int] = (),
) -> Report:
    """Check the strategies of a rule in prepared cases."""
    report = Report()
    for case in cases:
        trial, call = case.trial, case.trial.call
        compare = values if values is not None else not (draws(call) or call.op_name in NO_VALUE)
        tried: set[Any] = set()
        for placements in case.placements:
            try:
                strategies = list(rule(call, placements))
            except Exception as error:
                shown = ", ".join(map(str, placements))
                report.wrong.append(f"{call.target} on {call.world} ranks, {shown}: the rule raised {error!r}")
                continue
            for strategy in strategies:
                key = (strategy.inputs, strategy.outputs)
                by_layer = strategy.kind in skip_kinds and strategy.localize is None
                if not by_layer and key not in tried:
                    tried.add(key)
                    _check_strategy(trial, strategy, compare, call.world in gradients, report)
    return report


def _check_strategy(trial: Trial, strategy: Strategy, values: bool, gradients: bool, report: Report) -> None:
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
        report.sharded += any(_divides(p) for p in (*strategy.inputs, *strategy.outputs))


def _divides(placement: Placement) -> bool:
    """Whether ranks hold different values: sharded on some dimension, or partial."""
    return isinstance(placement, Partial) or (isinstance(placement, Shard) and bool(placement.layouts))


def prove(targets: Sequence[Any], rule: Rule, samples: Samples, free: bool = False) -> Report:
    """Check a rule on sample calls of all its operators.

    Raises:
        UnsoundRuleError: A strategy is wrong, or an operator has no sample, or none for which the rule shards a tensor.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _prove(targets, rule, sample_calls(samples), free)


def _prove(targets: Sequence[Any], rule: Rule, calls: Sequence[Sample], free: bool) -> Report:
    total = Report()
    for target in targets:
        mine = [sample for sample in calls if sample.target is target]
        if not mine:
            raise UnsoundRuleError(f"there is no sample call of {target}, so its rule cannot be validated")
        report = Report()
        for sample in mine:
            report.add(check(target, *sample.args, rule=rule, free=free, gradients=WORLDS[:2], **sample.kwargs))
        if report.wrong:
            more = f" (and {len(report.wrong) - 1} more)" if len(report.wrong) > 1 else ""
            raise UnsoundRuleError(f"the rule is wrong for {report.wrong[0]}{more}")
        if not report.sharded:
            raise UnsoundRuleError(
                f"the rule of {target} returned no strategy with a sharded tensor for {len(mine)} sample calls, "
                f"so it cannot be validated; add sample calls that it shards"
            )
        total.add(report)
    return total


def sample_calls(samples: Samples) -> list[Sample]:
    """Sample calls from a list, from a function, or by the name of their family."""
    if isinstance(samples, str):
        if samples not in FAMILIES:
            raise ValueError(f"there is no family of samples {samples!r}; pass calls: samples=[sample(op, ...)]")
        return FAMILIES[samples]()
    found = list(samples() if callable(samples) else samples)
    for sample in found:
        if not isinstance(sample, Sample):
            raise TypeError(f"create samples with paraxis.rules.sample(op, *args, **kwargs), not {sample!r}")
    return [sample._replace(target=_overload(sample.target)) for sample in found]


def _overload(target: Any) -> Any:
    target = overload_of(target)
    return target.default if isinstance(target, OpOverloadPacket) else target
