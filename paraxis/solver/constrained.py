"""The cheapest plan that is as the user wants it: constraints hold, and the parameters of a rank fit its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..placement import Placement
from ..rules import InputPlacement, Strategy
from .account import parameter_bytes
from .constraints import Constraint, ConstraintError, Constraints, check_axes
from .cost import CostModel
from .program import Program, Step
from .search import search
from .solution import Solution, Unsatisfiable
from .structure import Candidates

TRIES = 6
"""How often the price of memory is halved (in its logarithm) between nothing and the highest."""


@dataclass
class Wanted:
    """What is asked of a plan beyond being cheap.

    Attributes:
        constraints: Constraints about parameters.
        aliases: More names of a parameter, for those that several modules share.
        memory_limit: Bytes that the parameters of a rank may take. Parameters are then kept whole where that is faster
            and there is room; without a limit they are split wherever they can be.
        repeats: How many parameters of the model one of the program stands for.
    """

    constraints: Sequence[Constraint] = ()
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    memory_limit: int | None = None
    repeats: Mapping[str, int] = field(default_factory=dict)


def solve(program: Program, model: CostModel, wanted: Wanted, **options: Any) -> tuple[Solution, Candidates]:
    """The cheapest solution that is as wanted; ``options`` are those of :func:`search`.

    Raises:
        ConstraintError: There is none. The message names the constraints that cannot hold together.
    """
    undecided = any(v not in program.placements for v in program.parameters)
    if not undecided or not (wanted.constraints or wanted.memory_limit):
        return search(program, model, **options)
    wishes = Constraints(wanted.constraints, program, wanted.aliases)
    check_axes(wanted.constraints, wishes, program)
    try:
        return _within(program, model, wanted, wishes.permit, options)
    except (Unsatisfiable, _TooLarge) as problem:
        raise ConstraintError(_conflict(program, model, wanted, options, problem)) from None


class _TooLarge(Exception):
    """Split as far as it goes, the parameters of a rank take this many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


Permit = Callable[[Step, Strategy, tuple[InputPlacement, ...], tuple[Placement, ...]], bool]


def _within(
    program: Program, model: CostModel, wanted: Wanted, permit: Permit, options: dict[str, Any]
) -> tuple[Solution, Candidates]:
    """The fastest solution whose parameters fit: the lowest price of memory at which they do.

    Unless memory may be free, that is not called optimal: between two prices there may be a solution that is the
    cheapest at none.
    """
    limit = wanted.memory_limit
    if limit is None:
        return search(program, model, permit=permit, **options)

    def at(price: float) -> tuple[int, tuple[Solution, Candidates]]:
        each = price + 1 / model.memory  # as much as a part pays for itself
        found = search(program, replace(model, replication=each, narrow=each), permit=permit, **options)
        return parameter_bytes(program, found[0], model, wanted.repeats), found

    size, best = at(0.0)
    if size <= limit:
        return best
    low, high = 1e-15, max(model.replication, 1e-6)
    size, best = at(high)
    if size > limit:
        raise _TooLarge(size)
    for _ in range(TRIES):
        middle = (low * high) ** 0.5
        size, found = at(middle)
        if size <= limit:
            best, high = found, middle
        else:
            low = middle
    return replace(best[0], optimal=False), best[1]


def _conflict(
    program: Program,
    model: CostModel,
    wanted: Wanted,
    options: dict[str, Any],
    problem: Unsatisfiable | _TooLarge,
) -> str:
    """Leave out one wish after the other as long as there is no solution: those that remain are in conflict."""
    remaining = list(wanted.constraints)
    for constraint in wanted.constraints:
        fewer = [c for c in remaining if c is not constraint]
        try:
            _within(program, model, wanted, Constraints(fewer, program, wanted.aliases).permit, options)
        except (Unsatisfiable, _TooLarge) as still:
            remaining, problem = fewer, still
    names = "; ".join(map(str, remaining))
    if isinstance(problem, _TooLarge):
        assert wanted.memory_limit is not None
        together = f" together with {'the constraints' if len(remaining) > 1 else 'the constraint'} {names}"
        together = together if remaining else ""
        drop = "Drop one of them" if len(remaining) > 1 else "Drop it"
        advice = drop if remaining else "Use more ranks or a smaller dtype"
        return (
            f"memory_limit={wanted.memory_limit} ({_short(wanted.memory_limit)}) cannot hold{together}: split over "
            f"{program.world} ranks, the parameters of a rank take {_short(problem.size)} at least. {advice}, or allow "
            "more memory."
        )
    about = [
        f"{name} {tuple(tensor.shape)}"
        for value, tensor in zip(
            problem.step.inputs, problem.step.call.inputs if problem.step.call else (), strict=True
        )
        if (name := program.parameters.get(value)) is not None
    ]
    where = " and ".join(about) or str(problem.step.node.target)
    many = "these constraints cannot hold together" if len(remaining) > 1 else "this constraint cannot hold"
    return (
        f"{many} over {program.world} ranks: {names}. No way to run the operator on {where} is left; "
        f"{'drop one of them' if len(remaining) > 1 else 'drop it, or ask for another placement'}."
    )


def _short(size: int) -> str:
    amount = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.1f} {unit}" if unit != "bytes" else f"{size} bytes"
