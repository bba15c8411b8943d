"""Comparing two plans of a model: layers, parameters and collectives that differ, and the estimated costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ..placement import Placement, Shard
from ..utils.names import pattern_of
from .plan import Plan


@dataclass
class Difference:
    """One difference.

    Attributes:
        what: ``ranks``, ``layer``, ``parameter`` or ``collective``.
        where: The name, with ``*`` for block numbers.
        first: The value in the first plan.
        second: The value in the second plan.
        count: How many layers or parameters of that name differ in this way.
    """

    what: str
    where: str
    first: str
    second: str
    count: int = 1


@dataclass
class PlanDifference:
    """All differences between two plans. False if there are none.

    Attributes:
        differences: One per name; repeated blocks are counted, not listed.
        cost: Of both plans: ``seconds`` per forward pass, ``communication`` (seconds spent in collectives), and
            ``fraction`` (of the parameters, on one rank).
    """

    differences: list[Difference] = field(default_factory=list)
    cost: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.differences)

    def text(self) -> str:
        """The differences as text, first plan | second plan."""
        lines = [
            f"{d.what} {d.where}{f' (×{d.count})' if d.count > 1 else ''}: {d.first} | {d.second}"
            for d in self.differences
        ]
        if not lines:
            lines = ["Both plans have the same placements."]
        for name, scale, unit in (("seconds", 1e6, " µs"), ("communication", 1e6, " µs"), ("fraction", 100, " %")):
            a, b = (x * scale for x in self.cost[name])
            change = f" ({(b - a) / a:+.1%})" if a else ""
            lines.append(f"{_TITLES[name]}: {a:.1f}{unit} | {b:.1f}{unit}{change}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The differences and costs as a JSON-serializable dictionary."""
        return asdict(self)


_TITLES = {
    "seconds": "Estimated time per forward pass",
    "communication": "Estimated time in collectives",
    "fraction": "Parameters per rank",
}


def compare_plans(first: Plan, second: Plan) -> PlanDifference:
    """Compare two plans of the same model, layer by layer."""
    found = PlanDifference()
    if first.world_size != second.world_size:
        found.differences.append(Difference("ranks", "", str(first.world_size), str(second.world_size)))
    found.differences += _differing("layer", _axes(first), _axes(second))
    layers = {d.where for d in found.differences}
    found.differences += [
        d
        for d in _differing("parameter", _placements(first), _placements(second))
        if d.where.rpartition(".")[0] not in layers  # the difference of its layer implies it
    ]
    counts = [
        Counter(f"{c.kind.replace('_', '-')} after {pattern_of(c.module) or 'the model'}" for c in plan.collectives)
        for plan in (first, second)
    ]
    for key in dict.fromkeys([*counts[0], *counts[1]]):
        if counts[0][key] != counts[1][key]:
            found.differences.append(Difference("collective", key, str(counts[0][key]), str(counts[1][key])))
    found.cost = {
        "seconds": (first.seconds, second.seconds),
        "communication": (first.communication, second.communication),
        "fraction": (first.sharded_fraction, second.sharded_fraction),
    }
    return found


def _differing(what: str, first: dict[str, str], second: dict[str, str]) -> list[Difference]:
    """Differences between two dictionaries by name; those of repeated blocks are counted."""
    groups: Counter[tuple[str, str, str]] = Counter()
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name, "absent"), second.get(name, "absent")
        if a != b:
            groups[pattern_of(name), a, b] += 1
    return [Difference(what, where, a, b, count) for (where, a, b), count in groups.items()]


def _axes(plan: Plan) -> dict[str, str]:
    return {layer.name: layer.axis or "replicated" for layer in plan.layers}


def _placements(plan: Plan) -> dict[str, str]:
    return {name: _placement_text(p.placement) for name, p in plan.parameters.items()}


def _placement_text(placement: Placement) -> str:
    if isinstance(placement, Shard) and placement.layouts:
        return "sharded on dimension " + ", ".join(f"{d} ({x})" for d, x in placement.layouts)
    return "replicated"
