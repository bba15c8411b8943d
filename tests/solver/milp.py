"""The optimum as an integer program, solved by HiGHS: for programs too large for brute force.

Nothing here searches. A *version* of a value is the value between one use and the next, since using a value may leave
it in another placement. Which placements a version can have at all follows from going forward once. An *edge* of a step
is one strategy under one combination of the versions it meets: it takes every input in a placement and leaves it in
one. A solution takes one edge of every step, such that each version is left by one step in the placement in which the
next one meets it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from paraxis.placement import PARTIAL, REPLICATE, SHARED, Partial, Placement, Shard
from paraxis.rules import UNPLACED, Call, InputPlacement, Strategy, accepts_unplaced, replicated, rule_for
from paraxis.solver import Candidates, CostModel, Program
from paraxis.solver.cost import nbytes
from paraxis.solver.program import Step, Value

UNIT = 1e-9
"""Seconds in one unit of the objective: HiGHS stops at an absolute gap of a millionth of it."""


class Edge(NamedTuple):
    """One way through a step, by the position of the step."""

    step: int
    taken: tuple[InputPlacement, ...]
    left: tuple[Placement, ...]
    cost: float


def optimum(program: Program, model: CostModel, limit: float = 60.0) -> float:
    """The cost of the cheapest combination of strategies; an error if it is not proven within ``limit`` seconds."""
    return _Formulation(program, model).solve(limit)


class _Formulation:
    def __init__(self, program: Program, model: CostModel) -> None:
        self.program, self.model = program, model
        self.candidates = Candidates(program)
        self.steps = [(step, step.call) for step in program.steps if step.call is not None]
        self.returned = {v for step in program.steps if step.call is None for v in step.inputs}
        self.last = {v: i for i, (step, _) in enumerate(self.steps) for v in step.inputs}
        self.edges: list[Edge] = []
        self.rows: list[dict[int, float]] = []
        """Coefficients of the edges whose sum is zero."""
        self._build()

    # -- the edges and what joins them ---------------------------------------------------------------------------

    def _build(self) -> None:
        leavers: dict[Value, dict[Placement, list[int]]] = {}
        for i, (step, call) in enumerate(self.steps):
            assert not step.impure and step.home is None, "writes are not formulated"
            values = list(dict.fromkeys(step.inputs))
            live = [v for v in dict.fromkeys((*values, *step.outputs)) if self.last.get(v, -1) > i]
            takers: list[dict[InputPlacement, list[int]]] = [defaultdict(list) for _ in values]
            for edge in self._edges(i, step, call, values, live, leavers):
                for taker, placement in zip(takers, edge.taken):
                    taker[placement].append(len(self.edges))
                self.edges.append(edge)
            for value, taker in zip(values, takers):
                for placement, before in leavers.pop(value, {}).items():
                    self.rows.append({**dict.fromkeys(before, 1.0), **dict.fromkeys(taker[placement], -1.0)})
            for k, value in enumerate(live):
                leavers[value] = defaultdict(list)
                for number in self._of_step(i):
                    leavers[value][self.edges[number].left[k]].append(number)

    def _of_step(self, i: int) -> range:
        """The numbers of the edges of the step that was added last."""
        first = len(self.edges)
        while first and self.edges[first - 1].step == i:
            first -= 1
        return range(first, len(self.edges))

    def _edges(
        self, i: int, step: Step, call: Call, values: list[Value], live: list[Value], leavers: dict[Value, Any]
    ) -> Iterator[Edge]:
        """The ways through a step; of those between the same placements, the cheapest."""
        best: dict[tuple[Any, Any], float] = {}
        for taken in product(*(leavers[v] if v in leavers else [self._initial(v)] for v in values)):
            where = dict(zip(values, taken))
            for strategy in self._strategies(call, [where[v] for v in step.inputs]):
                places, cost = self._run(step, call, strategy, where)
                for v, tensor in zip((*step.inputs, *step.outputs), (*call.inputs, *call.outputs)):
                    if v in self.returned and self.last.get(v, i) == i and isinstance(places[v], Partial):
                        cost += self.model.move(PARTIAL, REPLICATE, nbytes(tensor))
                        places[v] = REPLICATE  # once, however often it is an input
                key = taken, tuple(places[v] for v in live)
                best[key] = min(cost, best.get(key, cost))
        for (taken, left), cost in best.items():
            yield Edge(i, taken, left, cost)

    def _initial(self, value: Value) -> InputPlacement:
        if value in self.program.placements:
            return self.program.placements[value]
        return UNPLACED if value in self.program.parameters else REPLICATE

    def _run(
        self, step: Step, call: Call, strategy: Strategy, where: dict[Value, InputPlacement]
    ) -> tuple[dict[Value, Placement], float]:
        """The placements of the values of a step after a strategy, and what it costs."""
        cost, places = self.model.run(call, strategy), {}
        for value, tensor, need in zip(step.inputs, call.inputs, strategy.inputs):
            now = places.get(value, where[value])  # the placement that an earlier use in the same step has left
            if now is UNPLACED:
                places[value] = need if isinstance(need, Shard) and need.layouts else REPLICATE
                shardable = any(self.candidates.layouts(value, d, n) for d, n in enumerate(tensor.shape))
                cost += self.model.store(tensor, places[value], shardable)
                continue
            cost += self.model.move(now, need, nbytes(tensor))
            if isinstance(now, Shard) and now != need and value in self.program.weights:
                cost += self.model.gather_weight(tensor)
            if now in (need, REPLICATE, SHARED):
                places[value] = now  # a full tensor stays, whatever part of it is used
            elif isinstance(now, Partial) and isinstance(need, Shard) and need.layouts:
                places[value] = need  # a partial value that was scattered
            else:
                places[value] = REPLICATE  # later uses take the gathered tensor
        return {**places, **dict(zip(step.outputs, strategy.outputs))}, cost

    def _strategies(self, call: Call, placements: Sequence[InputPlacement]) -> Iterator[Strategy]:
        """The replicated strategy and those of the rule, replicated inputs of sharded results marked as shared."""
        yield replicated(call)
        rule = rule_for(call.target)
        if rule is None:
            return
        free = [g is UNPLACED and not accepts_unplaced(call.target) for g in placements]
        options = [[REPLICATE, *self._shards(call, i)] if f else [g] for i, (f, g) in enumerate(zip(free, placements))]
        for combination in product(*options):
            for s in rule(call, combination):
                tensors, all_placements = (*call.inputs, *call.outputs), (*s.inputs, *s.outputs)
                boxes = [(t, p) for t, p in zip(tensors, all_placements) if isinstance(p, Shard)]
                if not all(layout.fits(t.shape[d]) for t, p in boxes for d, layout in p.layouts):
                    continue
                if any(p != REPLICATE for p in s.outputs):
                    real = [t.dtype.is_floating_point or t.dtype.is_complex for t in call.inputs]
                    inputs = tuple(SHARED if p == REPLICATE and r else p for p, r in zip(s.inputs, real))
                    s = Strategy(inputs, s.outputs, s.localize, s.kind)
                yield s

    def _shards(self, call: Call, i: int) -> list[Placement]:
        return [Shard.of(d, x) for d in range(call.inputs[i].ndim) for x in call.layouts.get((i, d), ())]

    # -- solving -------------------------------------------------------------------------------------------------

    def solve(self, limit: float) -> float:
        if not self.edges:
            return 0.0
        costs = np.array([edge.cost for edge in self.edges])
        steps = np.array([edge.step for edge in self.edges])
        least = np.full(len(self.steps), np.inf)
        np.minimum.at(least, steps, costs)
        one_each = csr_array((np.ones(len(steps)), (steps, np.arange(len(steps)))))
        constraints = [LinearConstraint(one_each, 1, 1)]
        if self.rows:
            entries = [(r, k, x) for r, row in enumerate(self.rows) for k, x in row.items()]
            r, k, x = (np.array(column) for column in zip(*entries))
            constraints.append(LinearConstraint(csr_array((x, (r, k)), shape=(len(self.rows), len(steps))), 0, 0))
        result = milp(
            (costs - least[steps]) / UNIT,  # without what every solution pays: differences are small beside it
            integrality=np.ones(len(steps)),
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 0.0, "time_limit": limit},
        )
        if result.status != 0:
            raise RuntimeError(f"{len(steps)} edges, {len(self.rows)} rows: {result.message}")
        chosen = result.x > 0.5
        for constraint in constraints:  # exactly, of the rounded solution
            assert np.array_equal(constraint.A @ chosen, np.broadcast_to(constraint.lb, constraint.A.shape[0]))
        return float(costs[chosen].sum())
