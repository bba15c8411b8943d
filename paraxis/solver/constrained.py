"""The cheapest plan under constraints and a memory limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConstraintError
from .account import parameter_bytes
from .choices import Permit
from .constraints import Constraint, Constraints, check_axes
from .cost import CostModel
from .program import Program
from .search import search
from .solution import Solution, Unsatisfiable
from .structure import Candidates

BISECTIONS = 6
"""How many times the interval of memory prices (in their logarithm) is halved."""


@dataclass
class Requirements:
    """What a plan must satisfy, besides being cheap.

    Attributes:
        constraints: Constraints on the placements of parameters.
        aliases: More names of parameters that several modules share.
        memory_limit: The bytes that the parameters of a rank may take. Parameters are then replicated where that is
            faster and fits; without a limit they are sharded wherever they can be.
        repeats: How many parameters of the model one parameter of the program stands for.
    """

    constraints: Sequence[Constraint] = ()
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    memory_limit: int | None = None
    repeats: Mapping[str, int] = field(default_factory=dict)


def solve(program: Program, model: CostModel, required: Requirements, **options: Any) -> tuple[Solution, Candidates]:
    """The cheapest solution that satisfies the requirements; ``options`` are those of :func:`search`.

    Raises:
        ConstraintError: There is none. The message names the constraints that cannot hold together.
    """
    undecided = any(v not in program.placements for v in program.parameters)
    if not undecided or not (required.constraints or required.memory_limit):
        return search(program, model, **options)
    constraints = Constraints(required.constraints, program, required.aliases)
    check_axes(required.constraints, constraints, program)
    try:
        return _within_memory(program, model, required, constraints.permit, options)
    except (Unsatisfiable, _TooLarge) as problem:
        raise ConstraintError(_conflict(program, model, required, options, problem)) from None


class _TooLarge(Exception):
    """Sharded as far as possible, the parameters of a rank take this many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def _within_memory(
    program: Program, model: CostModel, required: Requirements, permit: Permit, options: dict[str, Any]
) -> tuple[Solution, Candidates]:
    """The fastest solution whose parameters fit, at the lowest price of memory at which they do.

    Unless they fit at a price of zero, it is not called optimal: a solution that is the cheapest at no price may be
    better.
    """
    limit = required.memory_limit
    if limit is None:
        return search(program, model, permit=permit, **options)

    def at(price: float) -> tuple[int, tuple[Solution, Candidates]]:
        each = price + 1 / model.memory  # per byte; a shard pays for the bytes it has
        found = search(program, replace(model, replication=each, narrow=each), permit=permit, **options)
        return parameter_bytes(program, found[0], model, required.repeats), found

    size, best = at(0.0)
    if size <= limit:
        return best
    low, high = 1e-15, max(model.replication, 1e-6)
    size, best = at(high)
    if size > limit:
        raise _TooLarge(size)
    for _ in range(BISECTIONS):
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
    required: Requirements,
    options: dict[str, Any],
    problem: Unsatisfiable | _TooLarge,
) -> str:
    """The message for constraints in conflict: those that remain after dropping all that do not matter."""
    remaining = list(required.constraints)
    for constraint in required.constraints:
        fewer = [c for c in remaining if c is not constraint]
        try:
            _within_memory(program, model, required, Constraints(fewer, program, required.aliases).permit, options)
        except (Unsatisfiable, _TooLarge) as still:
            remaining, problem = fewer, still
    names = "; ".join(map(str, remaining))
    if isinstance(problem, _TooLarge):
        assert required.memory_limit is not None
        together = f" together with {'the constraints' if len(remaining) > 1 else 'the constraint'} {names}"
        together = together if remaining else ""
        drop = "Drop one of them" if len(remaining) > 1 else "Drop it"
        advice = drop if remaining else "Use more ranks or a smaller dtype"
        return (
            f"memory_limit={required.memory_limit} ({_short(required.memory_limit)}) cannot hold{together}: sharded "
            f"over {program.world} ranks, the parameters of a rank take at least {_short(problem.size)}. {advice}, or "
            "allow more memory."
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
        f"{'drop one of them' if len(remaining) > 1 else 'drop it, or choose another placement'}."
    )


def _short(size: int) -> str:
    """A number of bytes for people."""
    amount = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.1f} {unit}" if unit != "bytes" else f"{size} bytes"
