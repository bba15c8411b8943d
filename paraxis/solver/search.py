"""The search for the cheapest placement of every tensor.

It goes through the steps in order and keeps, for every combination of placements of the tensors *still in use* (the
frontier), the cheapest way to get there. What comes later depends on nothing else, so this is exhaustive backtracking
with memory, linear in the depth of the model as long as the frontier is narrow, and without recursion.

A state is dropped when it is dominated: when starting from another state and communicating its tensors into this
state's placements would cost no more. That keeps the result optimal under the cost model. The first pass follows up the
:data:`BEAM` most promising of the states that remain. Where that leaves any out, a second pass keeps all but those that
can no longer become cheaper than what the first has found, even if the rest of the program were split perfectly and
communicated nothing (branch and bound). Only where that is too much work as well (:data:`MAX_STATES`, :data:`EFFORT`)
is the solution not called optimal.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import inf
from typing import Any

import torch

from ..placement import PARTIAL, REPLICATE, SHARED, Partial, Placement, Replicate, Shard
from ..rules import UNPLACED, Call, InputPlacement, Strategy, Tensor, accepts_unplaced, replicated, rule_for, same_size
from ..rules.base import is_one
from .cost import CostModel, collective_between, nbytes
from .moves import sequence_length, sequence_shards, settled, share
from .program import Program, Step, Value
from .solution import Solution, Unsatisfiable
from .structure import Candidates

BEAM = 64
"""How many states the first pass follows up, and the second one when it has become too much work."""
MAX_STATES = 4096
"""How many states the second pass follows up at most."""
EFFORT = 100_000
"""How many states the second pass looks at, all steps together, before it has become too much work."""
ROUNDING = 1e-9
"""How much dearer, relatively, a sum of costs may come out in another order."""
ANCHORS = 8
"""How many of the best states others are compared with."""


@dataclass(frozen=True)
class _Choice:
    """One strategy from given placements, with what it does to the frontier."""

    strategy: Strategy
    after: tuple[Placement, ...]
    cost: float
    given: tuple[InputPlacement, ...] = ()


Permit = Callable[[Step, Strategy, tuple[InputPlacement, ...], tuple[Placement, ...]], bool]
"""Whether a step may be run this way, from these placements of its inputs, leaving them in those."""
Link = tuple[Any, Any]
State = tuple[int, ...]
"""Placements of the live tensors, by number."""
States = dict[State, tuple[float, "Link | None"]]
"""The cheapest way into each state."""
_FIXED = 1 << 30  # marks, as a negative position, a placement that does not depend on the state


class _Search:
    def __init__(
        self,
        program: Program,
        candidates: Candidates,
        model: CostModel,
        keep_sharded: bool,
        sequence: bool = False,
        permit: Permit | None = None,
    ) -> None:
        self.program, self.candidates, self.model, self.permit = program, candidates, model, permit
        self.keep_sharded, self.sequence = keep_sharded, sequence
        self.length = sequence_length(program) if sequence else None
        self.returned = tuple(v for step in program.steps if step.call is None for v in step.inputs)
        self._leaving = set(self.returned)
        self.sizes: dict[Value, int] = {}
        self.tensors: dict[Value, Tensor] = {}
        self.remaining: Counter[Value] = Counter()
        """How often a value is still to be used."""
        self.optimal = True
        self.uses = Counter(v for step in program.steps if step.call for v in step.inputs)
        self._splittable: dict[Value, bool] = {}
        self._names: dict[InputPlacement, int] = {}
        self._placements: list[InputPlacement] = []
        self._moves: dict[Step, dict[State, list[tuple[State, float, _Choice]]]] = {}

    def run(self) -> Solution:
        """The cheapest solution: found by following up a few states, proven or improved by following up all."""
        solution = self._pass(BEAM)
        if solution.optimal:
            return solution
        try:
            second = self._pass(MAX_STATES, bound=solution.cost)
        except Unsatisfiable:  # too much work, and what was left out were the states that lead to the first solution
            return solution
        return second if second.optimal or second.cost < solution.cost else solution

    def _pass(self, most: int, bound: float = inf) -> Solution:
        """Go through all steps with up to ``most`` states, none of which can only become dearer than ``bound``."""
        last = {v: i for i, step in enumerate(self.program.steps) if step.call for v in step.inputs}
        floors = self._floors() if bound < inf else []
        live: list[Value] = []
        states: States = {(): (0.0, None)}
        self.optimal, self.remaining, work = True, Counter(self.uses), 0
        for i, step in enumerate(self.program.steps):
            for v, t in zip(step.inputs, step.call.inputs if step.call else (), strict=False):
                self.sizes.setdefault(v, nbytes(t))
                self.tensors.setdefault(v, t)
            if step.call is not None:
                live, states = self._advance(i, step, live, states, last)
                if floors:
                    dearest = bound * (1 + ROUNDING) - floors[i + 1]
                    states = {state: way for state, way in states.items() if way[0] <= dearest}
                self.remaining.subtract(step.inputs)
                work += len(states)
                states = self._prune(live, states, most if work <= EFFORT else BEAM)
        cost, link = min(states.values(), key=lambda s: s[0])
        return self._read_back(cost, link)

    def _floors(self) -> list[float]:
        """For every step what it and all later ones cost at least: as if each were split perfectly."""
        floors = [0.0]
        for step in reversed(self.program.steps):
            alone = self.model.run(step.call, replicated(step.call)) if step.call is not None else 0.0
            floors.append(floors[-1] + alone / self.model.world)
        return floors[::-1]

    def _name(self, placement: InputPlacement) -> int:
        """A number for a placement: states are compared and hashed all the time."""
        number = self._names.get(placement)
        if number is None:
            number = self._names[placement] = len(self._placements)
            self._placements.append(placement)
        return number

    # -- one step ----------------------------------------------------------------------------------------------

    def _advance(
        self, i: int, step: Step, live: list[Value], states: States, last: dict[Value, int]
    ) -> tuple[list[Value], States]:
        where = {v: k for k, v in enumerate(live)}
        inputs = set(step.inputs)
        untouched = [v for v in live if v not in inputs and last.get(v, -1) > i]
        touched = [v for v in dict.fromkeys(step.inputs) if last[v] > i]
        made = [k for k, v in enumerate(step.outputs) if last.get(v, -1) > i]
        leaving = [
            v for v in (*dict.fromkeys(step.inputs), *step.outputs) if v in self.returned and last.get(v, i) == i
        ]
        if step.call is not None:
            for v, t in zip(step.outputs, step.call.outputs, strict=True):
                self.sizes[v], self.tensors[v] = nbytes(t), t
        kept = [where[v] for v in untouched]
        taken = [where[v] if v in where else self._name(self._initial(v)) - _FIXED for v in step.inputs]
        moves = self._moves.setdefault(step, {})
        result: States = {}
        for state, (cost, link) in states.items():
            given = tuple(state[k] if k >= 0 else k + _FIXED for k in taken)
            if given not in moves:
                moves[given] = [
                    (self._tail(step, choice, touched, made), choice.cost + self._leave(step, choice, leaving), choice)
                    for choice in self._choices(step, tuple(self._placements[k] for k in given))
                ]
            head = tuple(state[k] for k in kept)
            for tail, price, choice in moves[given]:
                key, total = head + tail, cost + price
                known = result.get(key)
                if known is None or total < known[0]:
                    result[key] = (total, (link, (step, choice)))
        if not result:
            raise Unsatisfiable(step)
        return [*untouched, *touched, *(step.outputs[k] for k in made)], result

    def _tail(self, step: Step, choice: _Choice, touched: list[Value], made: list[int]) -> State:
        """The part of the next state that this step decides."""
        moved = dict(zip(step.inputs, choice.after, strict=True))
        return tuple(self._name(p) for p in (*(moved[v] for v in touched), *(choice.strategy.outputs[k] for k in made)))

    def _leave(self, step: Step, choice: _Choice, leaving: list[Value]) -> float:
        """Values that are only returned from here on leave the frontier: what becomes of them depends on nothing else.

        What leaves the program is whole, or, where the caller does not read it, sharded; never a partial sum.
        Gathering a result is not charged: it is the caller's wish, and must not change how the model computes it.
        """
        if not leaving:
            return 0.0
        places = self._places(step, choice)
        sums = (v for v in leaving if isinstance(places[v], Partial))
        return sum(self.model.move(PARTIAL, REPLICATE, self.sizes.get(v, 0)) for v in sums)

    def _places(self, step: Step, choice: _Choice) -> dict[Value, Placement]:
        """Where the values of a step are after it."""
        values, placements = (*step.inputs, *step.outputs), (*choice.after, *choice.strategy.outputs)
        return dict(zip(values, placements, strict=True))

    def _initial(self, value: Value) -> InputPlacement:
        if value in self.program.placements:
            return self.program.placements[value]
        return UNPLACED if value in self.program.parameters else REPLICATE

    def _choices(self, step: Step, given: tuple[InputPlacement, ...]) -> Iterable[_Choice]:
        assert step.call is not None
        best: dict[Any, _Choice] = {}
        for strategy in self._strategies(step, step.call, given):
            choice = self._price(step, step.call, strategy, given)
            if self.permit is not None and not self.permit(step, strategy, given, choice.after):
                continue
            key = (strategy.outputs, choice.after)
            if key not in best or choice.cost < best[key].cost:
                best[key] = choice
        return best.values()

    def _strategies(self, step: Step, call: Call, given: tuple[InputPlacement, ...]) -> Iterable[Strategy]:
        yield replicated(call)
        if step.impure:
            yield from self._in_place(step, call, given)
            return
        yield from (s for s in self._by_rule(call, given) if step.home is None or self._stays(step.home, s))

    def _stays(self, home: Value, strategy: Strategy) -> bool:
        """Whether what a strategy writes into an input is where that input is."""
        place = self.program.placements.get(home, REPLICATE)
        return strategy.inputs[0] == place and strategy.outputs[0] == place

    def _by_rule(self, call: Call, given: tuple[InputPlacement, ...]) -> Iterable[Strategy]:
        rule = rule_for(call.target)
        if rule is None:
            return
        options: list[Sequence[InputPlacement]] = []
        for i, g in enumerate(given):
            if g is UNPLACED and not accepts_unplaced(call.target):
                options.append([REPLICATE, *self._free(call, i)])
            elif self.sequence and isinstance(g, Partial):
                options.append([g, *sequence_shards(call.inputs[i].shape, self.length, self.program.world)])
            else:
                options.append([g])
        for combination in product(*options):
            for strategy in rule(call, combination):
                if self._fits(call, strategy):
                    yield share(call, strategy)

    def _in_place(self, step: Step, call: Call, given: tuple[InputPlacement, ...]) -> Iterable[Strategy]:
        """A whole new value for a sharded input (a cache), written into each rank's shard."""
        place = given[0] if given else None
        if call.target is not torch.ops.aten.copy_.default or not isinstance(place, Shard) or not place.layouts:
            return
        target, source = call.inputs
        alike = target.ndim == source.ndim and all(map(same_size, target.shape, source.shape))
        if step.inputs[0].node.op == "placeholder" and alike:
            yield Strategy((place, place), (place,))

    def _free(self, call: Call, index: int) -> list[Placement]:
        dims = range(call.inputs[index].ndim)
        return [Shard.of(d, x) for d in dims for x in call.layouts.get((index, d), ())]

    def _fits(self, call: Call, strategy: Strategy) -> bool:
        pairs = [*zip(call.inputs, strategy.inputs, strict=True), *zip(call.outputs, strategy.outputs, strict=True)]
        return all(x.fits(tensor.shape[d]) for tensor, p in pairs if isinstance(p, Shard) for d, x in p.layouts)

    def _price(self, step: Step, call: Call, strategy: Strategy, given: tuple[InputPlacement, ...]) -> _Choice:
        cost = self.model.run(call, strategy)
        after: dict[Value, InputPlacement] = dict(zip(step.inputs, given, strict=True))
        for value, tensor, need in zip(step.inputs, call.inputs, strategy.inputs, strict=True):
            g = after[value]  # an input that is there twice is where its first use has left it
            if isinstance(g, (Replicate, Partial, Shard)):
                cost += self.model.move(g, need, nbytes(tensor))
                if self.sequence and isinstance(g, Partial) and need in (REPLICATE, SHARED):
                    cost += self._unsplit(tensor)
                if g != need and value in self.program.weights and isinstance(g, Shard):
                    cost += self.model.gather_weight(tensor)
                if self.model.backward and value in self.program.learned:
                    cost += self.model.return_gradient(g, need, nbytes(tensor), self.uses[value])
                after[value] = settled(g, need)
            else:
                kept = REPLICATE if need in (PARTIAL, SHARED) else need
                after[value] = kept
                if value not in self.program.placements:
                    cost += self.model.keep(tensor, kept, self._can_split(value, tensor.shape))
        return _Choice(strategy, tuple(after[v] for v in step.inputs), cost, given)  # type: ignore[misc]

    def _can_split(self, value: Value, shape: tuple[Any, ...]) -> bool:
        if value not in self._splittable:
            self._splittable[value] = any(self.candidates.layouts(value, d, n) for d, n in enumerate(shape))
        return self._splittable[value]

    # -- pruning -----------------------------------------------------------------------------------------------

    def _prune(self, live: list[Value], states: States, most: int) -> States:
        if len(states) < 2:
            return states
        ranked = sorted(states.items(), key=lambda item: item[1][0])
        own = [k for k, v in enumerate(live) if v in self.program.parameters and v not in self.program.placements]
        alike = self._neighbours(live, states) if len(states) > ANCHORS else []
        tolls: list[dict[tuple[int, int], float]] = [{} for _ in live]
        kept: list[tuple[State, tuple[float, Link | None]]] = []
        best: dict[State, list[State]] = {}  # by the places of parameters, which are part of the plan
        order = {state: position for position, (state, _) in enumerate(ranked)}
        for state, (cost, link) in ranked:
            anchors = best.setdefault(tuple(state[k] for k in own), [])
            near = (
                other
                for group, k in alike
                if self._whole(state[k])
                for other in group[state[:k] + state[k + 1 :]]
                if other is not state
            )
            if not any(
                order[anchor] < order[state] and self._reaches(live, anchor, states[anchor][0], state, cost, tolls)
                for anchor in chain(anchors, near)
            ):
                kept.append((state, (cost, link)))
                if len(anchors) < ANCHORS:
                    anchors.append(state)
        if len(kept) > most:
            self.optimal = False
            kept = self._beam(live, kept, most)
        return dict(kept)

    def _neighbours(self, live: list[Value], states: States) -> list[tuple[dict[State, list[State]], int]]:
        """For every position of the frontier, the states that differ there alone. A parameter's place is its own."""
        groups = []
        for k, value in enumerate(live):
            if value in self.program.parameters and value not in self.program.placements:
                continue
            if len({state[k] for state in states}) > 1:
                group: dict[State, list[State]] = {}
                for state in states:
                    group.setdefault(state[:k] + state[k + 1 :], []).append(state)
                groups.append((group, k))
        return groups

    def _beam(
        self, live: list[Value], ranked: list[tuple[State, tuple[float, Link | None]]], most: int
    ) -> list[tuple[State, tuple[float, Link | None]]]:
        """The most promising states: the cheapest so far, and the cheapest if all had to be made whole now."""
        debts: dict[tuple[int, int], float] = {}

        def settled_cost(item: tuple[State, tuple[float, Link | None]]) -> float:
            state, (cost, _) = item
            for value, number in zip(live, state, strict=True):
                size = self.sizes.get(value, 0)
                if (number, size) not in debts:
                    placement = self._placements[number]
                    known = isinstance(placement, (Replicate, Partial, Shard))
                    debts[number, size] = self.model.move(placement, REPLICATE, size) if known else 0.0  # type: ignore[arg-type]
                if value not in self.program.parameters:
                    cost += debts[number, size]
            return cost

        half = most // 2
        first, rest = ranked[:half], ranked[half:]
        return first + sorted(rest, key=settled_cost)[:half]

    def _reaches(
        self,
        live: list[Value],
        anchor: State,
        floor: float,
        state: State,
        cost: float,
        tolls: list[dict[tuple[int, int], float]],
    ) -> bool:
        """Whether moving the anchor's tensors into the placements of ``state`` costs no more than ``state`` does.

        ``tolls`` remembers, for every position, what it costs to get from one placement to another.
        """
        bridge = floor
        for k, (x, y) in enumerate(zip(anchor, state, strict=True)):
            if x == y:
                continue
            toll = tolls[k].get((x, y))
            if toll is None:
                toll = tolls[k][x, y] = self._toll(live[k], x, y)
            bridge += toll
            if bridge > cost:
                return False
        return True

    def _whole(self, number: int) -> bool:
        """Whether every rank has the whole tensor in this placement: it can be got to from any other."""
        placement = self._placements[number]
        return not (isinstance(placement, Partial) or (isinstance(placement, Shard) and placement.layouts))

    def _toll(self, value: Value, x: int, y: int) -> float:
        """What it costs at most to be in the first of two placements instead of the second; infinity if that cannot
        be said."""
        if value in self.program.parameters and value not in self.program.placements:
            return inf  # where a parameter lives is part of the plan
        if not self._whole(y):
            return inf  # rules follow the placements there are: nobody may offer to go there from here
        return self._bridge(value, self._placements[x], self._placements[y])  # type: ignore[arg-type]

    def _bridge(self, value: Value, a: Placement, b: Placement) -> float:
        """At most so much more is paid for a value that is in ``a`` and not, whole, in ``b``.

        A sum may have to be scattered at one use and gathered at the next, where no rule offers to reduce it at once.
        """
        size = self.sizes.get(value, 0)
        cost = self.model.move(a, b, size)
        if isinstance(a, Partial):
            if self.remaining[value] > 1:
                detour = self.model.collective("reduce_scatter", size) + self.model.collective("all_gather", size)
                cost = max(cost, detour)
            if self.sequence:
                cost += self._unsplit(self.tensors[value])
        if value in self.program.weights and collective_between(a, b) is not None:
            cost += self.model.gather_weight(self.tensors[value])
        return cost

    def _unsplit(self, tensor: Tensor) -> float:
        """The price of a sum that is made whole where it should be scattered on the sequence."""
        return self.model.unsplit if tensor.ndim > 1 and not is_one(tensor.shape[-1]) else 0.0

    def _read_back(self, cost: float, link: Link | None) -> Solution:
        strategies: dict[Step, Strategy] = {}
        costs: dict[Step, float] = {}
        given: dict[Step, tuple[InputPlacement, ...]] = {}
        final: dict[Value, Placement] = {}
        parameters: dict[Value, Placement] = {}
        while link is not None:
            link, (step, choice) = link
            strategies[step] = choice.strategy
            costs[step], given[step] = choice.cost, choice.given
            for value, placement in self._places(step, choice).items():
                final.setdefault(value, placement)  # going backwards, the last use comes first
                if value in self.program.parameters:
                    parameters[value] = placement  # and the first use comes last and wins
        parameters.update({v: p for v, p in self.program.placements.items() if v in self.program.parameters})
        results = tuple(self._result(final.get(v, self._initial(v))) for v in self.returned)
        return Solution(strategies, results, parameters, cost, self.optimal, costs, given)

    def _result(self, placement: InputPlacement) -> Placement:
        return placement if isinstance(placement, Shard) and self.keep_sharded else REPLICATE


def search(
    program: Program,
    model: CostModel,
    keep_sharded: bool = True,
    sequence: bool = False,
    permit: Permit | None = None,
) -> tuple[Solution, Candidates]:
    """The cheapest solution of a program, and the candidates it was chosen from.

    With ``sequence`` the sums of parallel layers are left split on the sequence wherever that is possible. ``permit``
    rules out ways to run a step; :class:`Unsatisfiable` is raised where it leaves none.
    """
    candidates = Candidates(program)
    collecting = gc.isenabled()
    gc.disable()  # millions of small tuples, none of them garbage: collecting would go through them again and again
    try:
        return _Search(program, candidates, model, keep_sharded, sequence, permit).run(), candidates
    finally:
        if collecting:
            gc.enable()
