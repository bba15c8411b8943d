"""Which states of the search to drop: those that another state dominates, and, beyond a limit, the least promising.

A state dominates another if starting from it and moving its tensors into the other's placements costs no more than the
other state does. Dropping dominated states preserves the optimum; dropping others, beyond the limit, may not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from math import inf
from typing import TypeVar

from ..placement import REPLICATE, Partial, Placement, Shard
from ..rules import InputPlacement, Tensor, Unplaced
from .choices import Choices
from .cost import collective_between, nbytes
from .program import Value

MAX_ANCHORS = 8
"""How many of the cheapest states with the same parameter placements the others are compared with."""

PlacementId = int
State = tuple[PlacementId, ...]
"""The placements of the live tensors, in the order of the frontier."""
Frontier = list[Value]
"""The live tensors: those that later steps use."""
Extra = TypeVar("Extra")
States = dict[State, tuple[float, Extra]]
"""For every state, the cost of the cheapest way to it, and what the search records with it."""


class PlacementIds:
    """Numbers for placements: the search compares and hashes states all the time."""

    def __init__(self) -> None:
        self._ids: dict[InputPlacement, PlacementId] = {}
        self.placements: list[InputPlacement] = []
        """By number."""
        self.is_full: list[bool] = []
        """By number: whether every rank holds the full tensor."""

    def id_of(self, placement: InputPlacement) -> PlacementId:
        """The number of a placement, the same for equal ones."""
        number = self._ids.get(placement)
        if number is None:
            number = self._ids[placement] = len(self.placements)
            self.placements.append(placement)
            sharded = isinstance(placement, Shard) and bool(placement.layouts)
            self.is_full.append(not sharded and not isinstance(placement, Partial))
        return number


class Pruner:
    """Drops states, for the choices of a program. ``tensors`` has every value of the program."""

    def __init__(self, choices: Choices, ids: PlacementIds, tensors: Mapping[Value, Tensor]) -> None:
        self.program, self.model, self.choices = choices.program, choices.model, choices
        self.ids, self.tensors = ids, tensors
        self.sizes = {value: nbytes(tensor) for value, tensor in tensors.items()}

    def prune(
        self, frontier: Frontier, states: States[Extra], remaining_uses: Mapping[Value, int], limit: int
    ) -> tuple[States[Extra], bool]:
        """The states that are not dominated, at most ``limit``; and whether others had to be dropped for that."""
        if len(states) < 2:
            return states, False
        ranked = sorted(states.items(), key=lambda item: item[1][0])
        rank = {state: position for position, (state, _) in enumerate(ranked)}
        parameters = [k for k, v in enumerate(frontier) if self._is_unplaced_parameter(v)]
        groups = self._neighbour_groups(frontier, states) if len(states) > MAX_ANCHORS else []
        tolls = _Tolls(self, frontier, remaining_uses)
        anchors_by_parameters: dict[State, list[State]] = {}  # their placements are part of the plan
        remaining = []
        for state, way in ranked:
            anchors = anchors_by_parameters.setdefault(tuple(state[k] for k in parameters), [])
            if not any(
                rank[other] < rank[state] and tolls.dominates(other, states[other][0], state, way[0])
                for other in chain(anchors, self._neighbours(state, groups))
            ):
                remaining.append((state, way))
                if len(anchors) < MAX_ANCHORS:
                    anchors.append(state)
        if len(remaining) <= limit:
            return dict(remaining), False
        return dict(self._most_promising(frontier, remaining, limit)), True

    def _is_unplaced_parameter(self, value: Value) -> bool:
        """Whether a value is a parameter whose placement the search decides."""
        return value in self.program.parameters and value not in self.program.placements

    def _neighbour_groups(
        self, frontier: Frontier, states: States[Extra]
    ) -> list[tuple[int, dict[State, list[State]]]]:
        """For every position, the states by the placements at all other positions. Not for parameters' positions."""
        groups = []
        for k, value in enumerate(frontier):
            if self._is_unplaced_parameter(value):
                continue
            if len({state[k] for state in states}) > 1:
                group: dict[State, list[State]] = {}
                for state in states:
                    group.setdefault(state[:k] + state[k + 1 :], []).append(state)
                groups.append((k, group))
        return groups

    def _neighbours(self, state: State, groups: list[tuple[int, dict[State, list[State]]]]) -> Iterator[State]:
        """The states that differ from this one at one position, where this one has a full tensor."""
        for k, group in groups:
            if self.ids.is_full[state[k]]:
                for other in group[state[:k] + state[k + 1 :]]:
                    if other is not state:
                        yield other

    def _most_promising(
        self, frontier: Frontier, ranked: list[tuple[State, tuple[float, Extra]]], limit: int
    ) -> list[tuple[State, tuple[float, Extra]]]:
        """The cheapest states so far, and the cheapest if all their tensors had to be replicated now."""
        debts: dict[tuple[PlacementId, int], float] = {}

        def cost_if_replicated(item: tuple[State, tuple[float, Extra]]) -> float:
            state, (cost, _) = item
            for value, number in zip(frontier, state, strict=True):
                size = self.sizes[value]
                if (number, size) not in debts:
                    placement = self.ids.placements[number]
                    debts[number, size] = (
                        0.0 if isinstance(placement, Unplaced) else self.model.move(placement, REPLICATE, size)
                    )
                if value not in self.program.parameters:
                    cost += debts[number, size]
            return cost

        half = limit // 2
        return ranked[:half] + sorted(ranked[half:], key=cost_if_replicated)[:half]

    def toll(self, value: Value, now: PlacementId, other: PlacementId, remaining_uses: int) -> float:
        """How much more a value in its placement costs, at most, than in the other; infinity if there is no bound."""
        if self._is_unplaced_parameter(value):
            return inf  # the placement of a parameter is part of the plan
        if not self.ids.is_full[other]:
            return inf  # rules follow the placements there are: none may lead to the other from here
        source, target = self.ids.placements[now], self.ids.placements[other]
        assert not isinstance(source, Unplaced) and not isinstance(target, Unplaced)
        return self._bridge(value, source, target, remaining_uses)

    def _bridge(self, value: Value, source: Placement, full: Placement, remaining_uses: int) -> float:
        """The most that it costs to have a value in ``source`` and not in ``full``, where every rank has all of it.

        A partial value may have to be scattered at one use and gathered at the next, where no rule reduces it at once.
        """
        tensor, size = self.tensors[value], self.sizes[value]
        cost = self.model.move(source, full, size)
        if isinstance(source, Partial):
            if remaining_uses > 1:
                detour = self.model.collective("reduce_scatter", size) + self.model.collective("all_gather", size)
                cost = max(cost, detour)
            cost += self.choices.unscattered(tensor)
        if value in self.program.weights and collective_between(source, full) is not None:
            cost += self.model.gather_weight(tensor)
        return cost


class _Tolls:
    """The tolls between placements at every position of a frontier, computed once each."""

    def __init__(self, pruner: Pruner, frontier: Frontier, remaining_uses: Mapping[Value, int]) -> None:
        self.pruner, self.frontier, self.remaining_uses = pruner, frontier, remaining_uses
        self.known: list[dict[tuple[PlacementId, PlacementId], float]] = [{} for _ in frontier]

    def dominates(self, one: State, one_cost: float, other: State, other_cost: float) -> bool:
        """Whether being in ``one`` and paying all tolls to ``other`` costs no more than being in ``other``."""
        total = one_cost
        for k, (x, y) in enumerate(zip(one, other, strict=True)):
            if x == y:
                continue
            toll = self.known[k].get((x, y))
            if toll is None:
                value = self.frontier[k]
                toll = self.known[k][x, y] = self.pruner.toll(value, x, y, self.remaining_uses[value])
            total += toll
            if total > other_cost:
                return False
        return True
