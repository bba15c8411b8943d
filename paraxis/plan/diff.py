"""What differs between two plans of a model, in its own terms, and what the difference costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ..placement import Placement, Shard
from .plan import Plan, pattern_of


@dataclass
class Difference:
    """One thing that differs: what it is, where, how often, and how it is in either plan."""

    what: str
    where: str
    first: str
    second: str
    count: int = 1


@dataclass
class PlanDifference:
    """All that differs between two plans.

    Attributes:
        differences: One for every kind of layer; what repeated blocks have in common is counted.
        cost: Of both: seconds of one pass, the part of them spent on collectives, and the fraction of the parameters
            that a rank holds.
    """

    differences: list[Difference] = field(default_factory=list)
    cost: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.differences)

    def text(self) -> str:
        """The difference as a person reads it."""
        lines = [
            f"{d.what} {d.where}{f' ({d.count} of them)' if d.count > 1 else ''}: {d.first} | {d.second}"
            for d in self.differences
        ]
        if not lines:
            lines = ["The plans place everything alike."]
        for name, scale, unit in (("seconds", 1e6, " µs"), ("communication", 1e6, " µs"), ("fraction", 100, " %")):
            a, b = (x * scale for x in self.cost[name])
            change = f", {(b - a) / a:+.1%}" if a else ""
            lines.append(f"{_TITLES[name]}: {a:.1f}{unit} | {b:.1f}{unit}{change}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_TITLES = {
    "seconds": "One pass, estimated",
    "communication": "of which collectives",
    "fraction": "Parameters on one rank",
}


def compare_plans(first: Plan, second: Plan) -> PlanDifference:
    """What differs between two plans of the same model."""
    found = PlanDifference()
    if first.world_size != second.world_size:
        found.differences.append(Difference("ranks", "", str(first.world_size), str(second.world_size)))
    found.differences += _differing("layer", _axes(first), _axes(second))
    told = {d.where for d in found.differences}
    found.differences += [
        d
        for d in _differing("parameter", _places(first), _places(second))
        if d.where.rpartition(".")[0] not in told  # the layer says it
    ]
    sums = [
        Counter(f"{c.kind} after {pattern_of(c.module) or 'the model'}" for c in p.collectives) for p in (first, second)
    ]
    for key in dict.fromkeys([*sums[0], *sums[1]]):
        if sums[0][key] != sums[1][key]:
            found.differences.append(Difference("collective", key, f"{sums[0][key]} times", f"{sums[1][key]} times"))
    found.cost = {
        "seconds": (first.seconds, second.seconds),
        "communication": (first.communication, second.communication),
        "fraction": (first.sharded_fraction, second.sharded_fraction),
    }
    return found


def _differing(what: str, first: dict[str, str], second: dict[str, str]) -> list[Difference]:
    """Differences between two dictionaries by name, those of repeated blocks together."""
    groups: Counter[tuple[str, str, str]] = Counter()
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name, "not there"), second.get(name, "not there")
        if a != b:
            groups[pattern_of(name), a, b] += 1
    return [Difference(what, where, a, b, count) for (where, a, b), count in groups.items()]


def _axes(plan: Plan) -> dict[str, str]:
    return {layer.name: layer.axis or "whole" for layer in plan.layers}


def _places(plan: Plan) -> dict[str, str]:
    return {name: _where(p.placement) for name, p in plan.parameters.items()}


def _where(placement: Placement) -> str:
    if isinstance(placement, Shard) and placement.layouts:
        return "split on dimension " + ", ".join(f"{d} ({x})" for d, x in placement.layouts)
    return "whole"
