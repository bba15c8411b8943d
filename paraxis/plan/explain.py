"""Why a parameter, or a step of the program, is where it is: what else was possible, and what it would have cost.

Every alternative is the best plan of the whole model in which this one thing is as the alternative says; the rest may
adapt to it. What it would have cost is the difference between that plan and the chosen one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

from ..graph.nodes import captured_module_of
from ..passes.solve import Solved
from ..placement import REPLICATE, Partial, Placement, Shard, local_shape
from ..rules import InputPlacement, Strategy
from ..rules.base import Unplaced
from ..solver import Account, Solution, Step, Unsatisfiable, Value, account, search
from ..solver.constraints import Constraints, parse, weight_axes
from ..solver.search import Permit
from .make import Planned, plan_offline


@dataclass
class Alternative:
    """Another placement, and what the best plan with it differs in.

    Attributes:
        placement: In words.
        possible: Whether there is a plan with it at all.
        seconds: By how much one pass would take longer.
        bytes: By how much the rank's part of this parameter would be larger.
        cost: By how much the cost would be higher that the search minimizes.
        collectives: What would be sent in addition, or no more, in words.
    """

    placement: str
    possible: bool = True
    seconds: float = 0.0
    bytes: int = 0
    cost: float = 0.0
    collectives: list[str] = field(default_factory=list)


@dataclass
class Explanation:
    """Why something is placed as it is.

    Attributes:
        name: The parameter, or the module and operator of a step.
        shape: Its whole shape.
        world_size: The number of ranks.
        placement: Where it is, in words.
        reason: What speaks for that.
        alternatives: What else was possible, the cheapest first.
    """

    name: str
    shape: tuple[int, ...]
    world_size: int
    placement: str
    reason: str
    alternatives: list[Alternative] = field(default_factory=list)

    def text(self) -> str:
        """The explanation as a person reads it."""
        size = "×".join(map(str, self.shape))
        lines = [f"{self.name} [{size}] over {self.world_size} ranks: {self.placement}.", f"  {self.reason}"]
        for other in self.alternatives:
            lines.append(f"  - {other.placement}: {_consequence(other)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}


def explain_plan(model: Any, tp_size: int, name: str, *, torch_dtype: Any = None, **kwargs: Any) -> list[Explanation]:
    """Explain the plan of a model over ``tp_size`` ranks, for everything that a name stands for.

    Args:
        model: As for :func:`paraxis.plan_model`.
        tp_size: The number of ranks.
        name: A parameter, a module (all its parameters are explained), or a node of the decomposed graph.
        torch_dtype: Dtype of the parameters; by default what the config says.
        kwargs: As for :func:`paraxis.plan_model`.
    """
    with plan_offline(model, tp_size, torch_dtype, kwargs) as planned:
        return explain_planned(planned, name)


def explain_planned(planned: Planned, name: str) -> list[Explanation]:
    """The same for a plan that is at hand."""
    known, stands_for = _stand_in(planned, name)
    teller = _Teller(planned)
    values = [
        value
        for value, own in planned.solved.program.parameters.items()
        for names in [[own, *planned.ctx.aliases.get(own, ())]]
        if any(n == known or n.startswith(f"{known}.") for n in names)
    ]
    found = [teller.parameter(value) for value in values]
    if not found:
        steps = [s for s in planned.solved.program.steps if s.call is not None and s.node.name == known]
        found = [teller.step(step) for step in steps]
    if not found:
        names = list(planned.solved.program.parameters.values())
        close = get_close_matches(name, [*names, *(n.rpartition(".")[0] for n in names)], 3)
        hint = f" Did you mean {' or '.join(map(repr, dict.fromkeys(close)))}?" if close else ""
        raise ValueError(f"{name!r} is neither a parameter nor a module nor a node that was planned.{hint}")
    for each in found:
        each.name = stands_for(each.name)
        for other in each.alternatives:
            other.collectives = [stands_for(text) for text in other.collectives]
    return found


def _stand_in(planned: Planned, name: str) -> tuple[str, Callable[[str], str]]:
    """The name in the block that was planned of what has this name in a block like it, and the way back."""
    for each in planned.repeated:
        for index, like in each.like.items():
            there, here = f"{each.path}.{index}.", f"{each.path}.{like}."
            if f"{name}.".startswith(there):
                known = f"{here}{f'{name}.'.removeprefix(there)}".removesuffix(".")
                return known, partial(_renamed, here=here, there=there)
    return name, lambda n: n


def _renamed(name: str, here: str, there: str) -> str:
    return f" {name}".replace(f" {here}", f" {there}")[1:]


class _Teller:
    """Solves the alternatives of one plan."""

    def __init__(self, planned: Planned) -> None:
        self.solved: Solved = planned.solved
        self.program, self.model = self.solved.program, self.solved.model
        self.reasons = dict(planned.plan.replicated)
        self.axes = weight_axes(self.program)
        self.wishes = Constraints(parse(planned.config.constraints), self.program, planned.ctx.aliases)
        self.sequence = bool(planned.config.enable_sequence_parallel)
        self.sizes = {
            value: tensor
            for step in self.program.steps
            if step.call is not None
            for value, tensor in [
                *zip(step.inputs, step.call.inputs, strict=True),
                *zip(step.outputs, step.call.outputs, strict=True),
            ]
        }

    # -- parameters --------------------------------------------------------------------------------------------

    def parameter(self, value: Value) -> Explanation:
        tensor = self.sizes[value]
        shape = tuple(int(n) for n in tensor.shape)
        chosen = _held(self.solved.solution.parameters.get(value, REPLICATE))
        others: list[Placement] = [REPLICATE]
        for dim, size in enumerate(shape):
            others += [Shard.of(dim, layout) for layout in self.solved.candidates.layouts(value, dim, size)]
        alternatives = []
        for other in dict.fromkeys(others):
            if other != chosen:
                found = self._alternative(self._where(value, other, shape), _placed(value, other))
                found.bytes = (_numel(other, shape) - _numel(chosen, shape)) * tensor.dtype.itemsize
                alternatives.append(found)
        name = self.program.parameters[value]
        if isinstance(chosen, Shard):
            reason = "Another placement would do as well:"
            if all(not other.possible or other.cost > 0 for other in alternatives):
                reason = "Every other placement would cost more:"
        else:
            reason = f"It stays whole: {self.reasons.get(name, 'splitting it costs more')}."
        return self._explanation(name, shape, self._where(value, chosen, shape), reason, alternatives)

    def _where(self, value: Value, placement: Placement, shape: tuple[int, ...]) -> str:
        if not isinstance(placement, Shard):
            return "whole on every rank"
        dims = [d for d, _ in placement.layouts]
        axes = [axis for axis, d in self.axes.get(value, {}).items() if dims == [d]]
        local = "×".join(map(str, local_shape(placement, shape, 0)))
        layout = ", ".join(str(x) for _, x in placement.layouts)
        form = "" if layout in ("even", "uneven") else f", packed as {layout}" if len(layout) < 80 else ", packed"
        axis = f" ({' or '.join(axes)})" if axes else ""
        return f"split on dimension {', '.join(map(str, dims))}{axis}, {local} on the first rank{form}"

    # -- steps -------------------------------------------------------------------------------------------------

    def step(self, step: Step) -> Explanation:
        assert step.call is not None
        chosen = self.solved.solution.strategies[step]
        seen: dict[tuple[Placement, ...], None] = {}

        def note(at: Step, strategy: Strategy, given: tuple[InputPlacement, ...], after: tuple[Placement, ...]) -> bool:
            if at is step:
                seen.setdefault(strategy.outputs)
            return self.wishes.permit(at, strategy, given, after)

        self._search(note)
        alternatives = [
            self._alternative(_of(outputs), _made(step, outputs)) for outputs in seen if outputs != chosen.outputs
        ]
        name = f"{captured_module_of(step.node) or 'the model'}: {step.node.name} ({step.call.target})"
        shape = tuple(n if isinstance(n, int) else -1 for n in step.call.outputs[0].shape)
        inputs = ", ".join(map(_word, self.solved.solution.given[step])) or "nothing"
        reason = f"Its inputs come {inputs}; it takes them {', '.join(map(_word, chosen.inputs))}."
        return self._explanation(name, shape, _of(chosen.outputs), reason, alternatives)

    # -- both --------------------------------------------------------------------------------------------------

    def _explanation(
        self, name: str, shape: tuple[int, ...], where: str, reason: str, alternatives: list[Alternative]
    ) -> Explanation:
        ordered = sorted(alternatives, key=lambda a: (not a.possible, a.cost))
        return Explanation(name, shape, self.program.world, where, reason, ordered)

    def _search(self, permit: Permit) -> Solution:
        return search(self.program, self.model, self.solved.keep_sharded, self.sequence, permit)[0]

    def _alternative(self, where: str, forced: Permit) -> Alternative:
        def permit(
            step: Step, strategy: Strategy, given: tuple[InputPlacement, ...], after: tuple[Placement, ...]
        ) -> bool:
            return forced(step, strategy, given, after) and self.wishes.permit(step, strategy, given, after)

        try:
            solution = self._search(permit)
        except Unsatisfiable:
            return Alternative(where, possible=False)
        spent = account(self.program, solution, self.model)
        return Alternative(
            where,
            seconds=spent.seconds - self.solved.account.seconds,
            cost=solution.cost - self.solved.solution.cost,
            collectives=self._difference(spent),
        )

    def _difference(self, other: Account) -> list[str]:
        """The collectives that one plan has and the other has not."""
        before, after = (Counter(self._sent(x)) for x in (self.solved.account, other))
        more = [f"{n} more {what}" for what, n in (after - before).items()]
        less = [f"{n} less {what}" for what, n in (before - after).items()]
        return more + less

    def _sent(self, spent: Account) -> list[str]:
        return [
            f"{kind} of {_bytes(size)} after {captured_module_of(value.node) or value.node.name}"
            for kind, value, size in spent.sent
        ]


def _placed(value: Value, placement: Placement) -> Permit:
    """Only plans that have a parameter here."""

    def permit(step: Step, strategy: Strategy, given: tuple[InputPlacement, ...], after: tuple[Placement, ...]) -> bool:
        return all(
            _held(place) == placement
            for v, before, place in zip(step.inputs, given, after, strict=True)
            if v == value and isinstance(before, Unplaced)
        )

    return permit


def _made(step: Step, outputs: tuple[Placement, ...]) -> Permit:
    """Only plans in which a step leaves its results so."""

    def permit(at: Step, strategy: Strategy, given: tuple[InputPlacement, ...], after: tuple[Placement, ...]) -> bool:
        return at is not step or strategy.outputs == outputs

    return permit


def _held(placement: Placement) -> Placement:
    """How a parameter is kept: a shared one is whole."""
    return placement if isinstance(placement, Shard) and placement.layouts else REPLICATE


def _numel(placement: Placement, shape: tuple[int, ...]) -> int:
    total = 1
    for n in local_shape(placement, shape, 0):
        total *= n
    return total


def _of(outputs: tuple[Placement, ...]) -> str:
    return "its result " + ", ".join(map(_word, outputs))


def _word(placement: InputPlacement) -> str:
    if isinstance(placement, Partial):
        return "as sums in parts"
    if isinstance(placement, Shard) and placement.layouts:
        return f"split on dimension {', '.join(str(d) for d, _ in placement.layouts)}"
    return "as the plan places it" if isinstance(placement, Unplaced) else "whole"


def _consequence(other: Alternative) -> str:
    if not other.possible:
        return "not possible: no operator that uses it can run so."
    parts = [f"{other.seconds * 1e6:+.1f} µs per pass"]
    if other.bytes:
        parts.append(f"{'+' if other.bytes > 0 else '-'}{_bytes(abs(other.bytes))} on every rank")
    text = ", ".join(parts)
    if other.collectives:
        text += f" ({'; '.join(other.collectives[:4])}{'; ...' if len(other.collectives) > 4 else ''})"
    if other.cost <= 0:
        text += ", as good as what was chosen"
    return text + "."


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
