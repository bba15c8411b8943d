"""The optimum by brute force: no memoization, no frontier, no pruning except by the best found so far."""

from __future__ import annotations

from itertools import product
from typing import Any

from paraxis.placement import PARTIAL, REPLICATE, SHARED, Partial, Shard
from paraxis.rules import UNPLACED, Strategy, accepts_unplaced, replicated, rule_for
from paraxis.solver import Candidates, CostModel, Program
from paraxis.solver.cost import nbytes


def cheapest(program: Program, model: CostModel, keep_sharded: bool) -> float:
    """The cost of the best combination of strategies."""
    return _Exhaustive(program, model, keep_sharded).run()


class _Exhaustive:
    def __init__(self, program: Program, model: CostModel, keep_sharded: bool) -> None:
        self.program, self.model, self.keep_sharded = program, model, keep_sharded
        self.candidates = Candidates(program)
        self.best = float("inf")

    def run(self) -> float:
        where = {v: UNPLACED if v in self.program.parameters else REPLICATE for v in self.program.leaves}
        self._from(0, where, 0.0)
        return self.best

    def _from(self, i: int, where: dict[Any, Any], cost: float) -> None:
        if cost >= self.best:
            return
        if i == len(self.program.steps):
            self.best = cost
            return
        step = self.program.steps[i]
        if step.call is None:
            for value in step.inputs:
                if where[value] == PARTIAL:  # gathering a result is not charged
                    cost += self.model.move(PARTIAL, REPLICATE, self._size(value))
            self._from(i + 1, where, cost)
            return
        tried = set()
        for strategy in self._strategies(step, where):
            if (strategy.inputs, strategy.outputs) in tried:
                continue
            tried.add((strategy.inputs, strategy.outputs))
            after, price = dict(where), self.model.run(step.call, strategy)
            for value, tensor, need in zip(step.inputs, step.call.inputs, strategy.inputs):
                price += self._move(value, tensor, need, after[value], after)
            after.update(zip(step.outputs, strategy.outputs))
            self._from(i + 1, after, cost + price)

    def _move(self, value: Any, tensor: Any, need: Any, now: Any, after: dict[Any, Any]) -> float:
        """The price of moving an input, whose placement afterwards is set in ``after``."""
        if now is UNPLACED:
            after[value] = REPLICATE if need in (PARTIAL, SHARED) else need
            shardable = any(self.candidates.layouts(value, d, n) for d, n in enumerate(tensor.shape))
            return self.model.store(tensor, after[value], shardable)
        price = self.model.move(now, need, nbytes(tensor))
        if now != need and value in self.program.parameters and isinstance(now, Shard):
            price += self.model.gather_weight(tensor)
        if now in (need, REPLICATE, SHARED):
            return price  # a full tensor stays, whatever part of it is used
        scattered = isinstance(now, Partial) and isinstance(need, Shard) and need.layouts
        after[value] = need if scattered else REPLICATE  # later uses take the gathered tensor
        return price

    def _strategies(self, step: Any, where: dict[Any, Any]) -> list[Strategy]:
        call, found = step.call, [replicated(step.call)]
        rule = rule_for(call.target)
        if rule is None:
            return found
        options: list[list[Any]] = []
        for i, value in enumerate(step.inputs):
            if where[value] is UNPLACED and not accepts_unplaced(call.target):
                shards = [Shard.of(d, x) for d in range(call.inputs[i].ndim) for x in call.layouts.get((i, d), ())]
                options.append([REPLICATE, *shards])
            else:
                options.append([where[value]])
        for placements in product(*options):
            for s in rule(call, placements):
                pairs = [*zip(call.inputs, s.inputs), *zip(call.outputs, s.outputs)]
                if not all(x.fits(t.shape[d]) for t, p in pairs if isinstance(p, Shard) for d, x in p.layouts):
                    continue
                sharded = any(p != REPLICATE for p in s.outputs)
                inputs = tuple(
                    SHARED if sharded and p == REPLICATE and t.dtype.is_floating_point else p
                    for t, p in zip(call.inputs, s.inputs)
                )
                found.append(Strategy(inputs, s.outputs))
        return found

    def _size(self, value: Any) -> int:
        for step in self.program.steps:
            for v, t in zip(step.outputs, step.call.outputs if step.call else ()):
                if v == value:
                    return nbytes(t)
            for v, t in zip(step.inputs, step.call.inputs if step.call else ()):
                if v == value:
                    return nbytes(t)
        return 0
