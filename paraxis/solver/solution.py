"""The result of a search: a strategy for every step, and with it a placement for every tensor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..placement import REPLICATE, Layout, Placement, Shard
from ..rules import InputPlacement, Strategy
from .program import Step, Value


@dataclass
class Solution:
    """The result of a search.

    Attributes:
        strategies: The chosen strategy of every step with a call.
        results: Placements of the returned values, by position among the returned tensors.
        parameters: The placement of every parameter.
        cost: Seconds, under the cost model.
        optimal: Whether no cheaper assignment exists under the cost model.
        costs: What every step adds to the cost.
        input_placements: The placements of the inputs of every step before it.
    """

    strategies: dict[Step, Strategy]
    results: tuple[Placement, ...]
    parameters: dict[Value, Placement]
    cost: float
    optimal: bool
    costs: dict[Step, float] = field(default_factory=dict)
    input_placements: dict[Step, tuple[InputPlacement, ...]] = field(default_factory=dict)


class Unsatisfiable(ValueError):
    """No way to run this step is permitted."""

    def __init__(self, step: Step) -> None:
        super().__init__(f"no way to run {step.node.target} is permitted")
        self.step = step


def on_one_rank(solution: Solution) -> Solution:
    """A plan for two ranks, run by one: the same sharded dimensions, of which the rank holds everything."""

    def on_one(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        return Shard(tuple((d, Layout.even(1, 1)) for d, _ in placement.layouts))

    strategies = {
        step: Strategy(tuple(map(on_one, s.inputs)), tuple(map(on_one, s.outputs)), None, s.kind)
        for step, s in solution.strategies.items()
    }
    parameters = {value: on_one(p) for value, p in solution.parameters.items()}
    results = (REPLICATE,) * len(solution.results)
    return replace(solution, strategies=strategies, parameters=parameters, results=results)
