"""The search for the cheapest placement of every tensor.

It goes through the steps in order and records, for every combination of placements of the tensors *still in use* (the
frontier), the cheapest way to it. Nothing else affects later steps, so this is exhaustive backtracking with
memoization, linear in the depth of the model as long as the frontier is narrow, and without recursion.

States that another one dominates are dropped (see :mod:`paraxis.solver.pruning`), which preserves the optimum. The
first pass follows the :data:`BEAM_WIDTH` most promising of the remaining states. If it had to drop any, a second pass
follows all of them, except those that cannot become cheaper than what the first pass has found, even if the rest of
the program were sharded perfectly and communicated nothing (branch and bound). Only if that is too much work as well
(:data:`MAX_STATES`, :data:`MAX_WORK`) is the solution not called optimal.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import Any

from ..placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from ..rules import Call, InputPlacement, Strategy, Tensor, replicated
from .choices import Choice, Choices, Permit
from .cost import CostModel, nbytes
from .program import Program, Step, Value
from .pruning import Frontier, PlacementIds, Pruner, State, States
from .solution import Solution, Unsatisfiable
from .structure import Candidates

BEAM_WIDTH = 64
"""How many states the first pass follows, and the second one when it has become too much work."""
MAX_STATES = 4096
"""How many states the second pass follows at most."""
MAX_WORK = 100_000
"""How many states the second pass visits, all steps together, before it has become too much work."""
ROUNDING = 1e-9
"""How much two sums of the same costs in a different order may differ, relatively."""

Trail = tuple[Any, Step, Choice]
"""The last step and its choice, after the trail (or None) of the steps before it: a linked list."""
Ways = States[Trail | None]
"""For every state, the cost of the cheapest way to it, and its trail."""
Move = tuple[State, float, Choice]
"""A choice, with its cost, and the part of the next state that the step decides."""
Select = Callable[[State], State]
"""Selects some placements of a state."""


@dataclass(frozen=True)
class _Transition:
    """How a step changes the frontier. The same in every state, so it is computed once.

    Attributes:
        entering: The inputs of the step that become live here; they are appended to the state before ``inputs``.
        inputs: Selects the placements of the step's inputs from the state.
        untouched: Selects the placements of the live tensors that the step does not use: the first part of the next
            state. The second part are those that the step decides.
        reused: The inputs that later steps use again.
        used_outputs: The positions of the outputs that later steps use.
        returned: The values that from here on are only returned.
        frontier: The live tensors after the step.
    """

    step: Step
    call: Call
    entering: list[Value]
    inputs: Select
    untouched: Select
    reused: list[Value]
    used_outputs: list[int]
    returned: list[Value]
    frontier: Frontier


class _Search:
    """One search: both passes, with what they share."""

    def __init__(
        self,
        program: Program,
        candidates: Candidates,
        model: CostModel,
        keep_sharded: bool,
        sequence: bool = False,
        permit: Permit | None = None,
    ) -> None:
        self.program, self.model, self.keep_sharded = program, model, keep_sharded
        self.returned = tuple(v for step in program.steps if step.call is None for v in step.inputs)
        self.tensors = _tensors(program)
        self.transitions = _transitions(program, set(self.returned))
        self.choices = Choices(program, candidates, model, sequence, permit)
        self.ids = PlacementIds()
        self.pruner = Pruner(self.choices, self.ids, self.tensors)
        self._moves: dict[Step, dict[State, list[Move]]] = {t.step: {} for t in self.transitions}

    def run(self) -> Solution:
        """The cheapest solution: found by following a few states, proven or improved by following all."""
        solution = self._pass(BEAM_WIDTH)
        if solution.optimal:
            return solution
        try:
            second = self._pass(MAX_STATES, bound=solution.cost)
        except Unsatisfiable:  # too much work: the states that lead to the first solution were dropped
            return solution
        return second if second.optimal or second.cost < solution.cost else solution

    def _pass(self, limit: int, bound: float = inf) -> Solution:
        """Go through all steps with up to ``limit`` states, none of which must become more expensive than ``bound``."""
        floors = self._floors() if bound < inf else []
        ways: Ways = {(): (0.0, None)}
        optimal, remaining_uses, work = True, Counter(self.choices.uses), 0
        for i, transition in enumerate(self.transitions):
            ways = self._advance(transition, ways)
            if floors:
                highest = bound * (1 + ROUNDING) - floors[i + 1]
                ways = {state: way for state, way in ways.items() if way[0] <= highest}
            remaining_uses.subtract(transition.step.inputs)
            work += len(ways)
            most = limit if work <= MAX_WORK else BEAM_WIDTH
            ways, dropped = self.pruner.prune(transition.frontier, ways, remaining_uses, most)
            optimal = optimal and not dropped
        cost, trail = min(ways.values(), key=lambda way: way[0])
        return self._solution(cost, trail, optimal)

    def _floors(self) -> list[float]:
        """For every step, the least that it and all later ones cost: as if each were sharded perfectly."""
        floors = [0.0]
        for transition in reversed(self.transitions):
            alone = self.model.run(transition.call, replicated(transition.call))
            floors.append(floors[-1] + alone / self.model.world)
        return floors[::-1]

    # -- one step ----------------------------------------------------------------------------------------------

    def _advance(self, transition: _Transition, ways: Ways) -> Ways:
        """The cheapest ways to all states after a step."""
        step, moves = transition.step, self._moves[transition.step]
        entering = tuple(self.ids.id_of(self.choices.initial(v)) for v in transition.entering)
        result: Ways = {}
        for state, (cost, trail) in ways.items():
            inputs = transition.inputs(state + entering)
            found = moves.get(inputs)
            if found is None:
                found = moves[inputs] = self._moves_from(transition, inputs)
            untouched = transition.untouched(state)
            for decided, price, choice in found:
                key, total = untouched + decided, cost + price
                known = result.get(key)
                if known is None or total < known[0]:
                    result[key] = (total, (trail, step, choice))
        if not result:
            raise Unsatisfiable(step)
        return result

    def _moves_from(self, transition: _Transition, inputs: State) -> list[Move]:
        """What a step may do with inputs in these placements."""
        moves = []
        for choice in self.choices.of(transition.step, tuple(self.ids.placements[number] for number in inputs)):
            after = dict(zip(transition.step.inputs, choice.after, strict=True))
            decided = [after[v] for v in transition.reused]
            decided += [choice.strategy.outputs[k] for k in transition.used_outputs]
            price = choice.cost + self._reduce_returned(transition, choice)
            moves.append((tuple(self.ids.id_of(p) for p in decided), price, choice))
        return moves

    def _reduce_returned(self, transition: _Transition, choice: Choice) -> float:
        """The cost of reducing returned values, which leave the frontier here.

        A returned value is replicated or, if the caller does not read it, sharded; never partial. Gathering it is not
        charged: the caller asked for it, and it must not affect how the model computes.
        """
        if not transition.returned:
            return 0.0
        placements = choice.placements(transition.step)
        partial = (v for v in transition.returned if isinstance(placements[v], Partial))
        return sum(self.model.move(PARTIAL, REPLICATE, nbytes(self.tensors[v])) for v in partial)

    # -- the solution ------------------------------------------------------------------------------------------

    def _solution(self, cost: float, trail: Trail | None, optimal: bool) -> Solution:
        """Follow the trail of the cheapest way back to the first step."""
        strategies: dict[Step, Strategy] = {}
        costs: dict[Step, float] = {}
        inputs: dict[Step, tuple[InputPlacement, ...]] = {}
        final: dict[Value, Placement] = {}
        parameters: dict[Value, Placement] = {}
        while trail is not None:
            trail, step, choice = trail
            strategies[step], costs[step], inputs[step] = choice.strategy, choice.cost, choice.before
            for value, placement in choice.placements(step).items():
                final.setdefault(value, placement)  # going backwards, the last use comes first
                if value in self.program.parameters:
                    parameters[value] = placement  # and the first use comes last and wins
        parameters.update({v: p for v, p in self.program.placements.items() if v in self.program.parameters})
        results = tuple(self._result(final.get(v, self.choices.initial(v))) for v in self.returned)
        return Solution(strategies, results, parameters, cost, optimal, costs, inputs)

    def _result(self, placement: InputPlacement) -> Placement:
        return placement if isinstance(placement, Shard) and self.keep_sharded else REPLICATE


def _tensors(program: Program) -> dict[Value, Tensor]:
    """Shape and dtype of every value that a step takes or makes."""
    tensors: dict[Value, Tensor] = {}
    for step in program.steps:
        if step.call is not None:
            for value, tensor in zip(step.inputs, step.call.inputs, strict=True):
                tensors.setdefault(value, tensor)
            tensors.update(zip(step.outputs, step.call.outputs, strict=True))
    return tensors


def _transitions(program: Program, returned: set[Value]) -> list[_Transition]:
    """How each step with a call changes the frontier."""
    last_use = {v: i for i, step in enumerate(program.steps) if step.call for v in step.inputs}
    transitions = []
    frontier: Frontier = []
    for i, step in enumerate(program.steps):
        if step.call is None:
            continue
        position = {v: k for k, v in enumerate(frontier)}
        inputs = dict.fromkeys(step.inputs)
        entering = [v for v in inputs if v not in position]
        position.update({v: len(frontier) + k for k, v in enumerate(entering)})
        untouched = [v for v in frontier if v not in inputs and last_use.get(v, -1) > i]
        reused = [v for v in inputs if last_use[v] > i]
        used_outputs = [k for k, v in enumerate(step.outputs) if last_use.get(v, -1) > i]
        transition = _Transition(
            step=step,
            call=step.call,
            entering=entering,
            inputs=_select([position[v] for v in step.inputs]),
            untouched=_select([position[v] for v in untouched]),
            reused=reused,
            used_outputs=used_outputs,
            returned=[v for v in (*inputs, *step.outputs) if v in returned and last_use.get(v, i) == i],
            frontier=[*untouched, *reused, *(step.outputs[k] for k in used_outputs)],
        )
        transitions.append(transition)
        frontier = transition.frontier
    return transitions


def _select(positions: Sequence[int]) -> Select:
    """A function that takes these positions out of a state: ``itemgetter``, which is not a tuple for one position."""
    if not positions:
        return lambda state: ()
    if len(positions) == 1:
        only = positions[0]
        return lambda state: (state[only],)
    return itemgetter(*positions)


def search(
    program: Program,
    model: CostModel,
    keep_sharded: bool = True,
    sequence: bool = False,
    permit: Permit | None = None,
) -> tuple[Solution, Candidates]:
    """The cheapest solution of a program, and the candidates it was chosen from.

    With ``keep_sharded``, returned values may stay sharded. With ``sequence``, the partial results of parallel layers
    are scattered on the sequence wherever possible. ``permit`` rules out ways to run a step; :class:`Unsatisfiable` is
    raised where none is left.
    """
    candidates = Candidates(program)
    collecting = gc.isenabled()
    gc.disable()  # millions of small tuples, none of them garbage: collecting would go through them again and again
    try:
        return _Search(program, candidates, model, keep_sharded, sequence, permit).run(), candidates
    finally:
        if collecting:
            gc.enable()
