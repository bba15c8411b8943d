"""Why a parameter, or an operator of the program, is placed as it is: the alternatives, and what each would cost.

An alternative is the best plan of the model in which this one placement is fixed to another value; all others may
adapt. Its cost is the difference between that plan and the chosen one.
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
from ..solver.choices import Permit
from ..solver.constraints import Constraints, parse, weight_axes
from .offline import Planned, plan_offline
from .plan import ParameterPlan


@dataclass
class Alternative:
    """Another placement, and how the best plan with it differs from the chosen plan.

    Attributes:
        placement: The placement as text.
        possible: Whether any plan has it.
        seconds: Additional estimated seconds per forward pass.
        bytes: Additional bytes of this parameter on each rank.
        cost: Additional cost, as the search minimizes it.
        collectives: Collectives that are added or removed, as text.
    """

    placement: str
    possible: bool = True
    seconds: float = 0.0
    bytes: int = 0
    cost: float = 0.0
    collectives: list[str] = field(default_factory=list)


@dataclass
class Explanation:
    """Why a parameter or the output of an operator has its placement.

    Attributes:
        name: The parameter, or the module and operator.
        shape: The global shape.
        world_size: The number of ranks.
        placement: The placement as text.
        reason: Why it was chosen.
        alternatives: The other placements, the cheapest first.
    """

    name: str
    shape: tuple[int, ...]
    world_size: int
    placement: str
    reason: str
    alternatives: list[Alternative] = field(default_factory=list)

    def text(self) -> str:
        """The explanation as text, one line per alternative."""
        size = "×".join(map(str, self.shape))
        lines = [f"{self.name} [{size}] on {self.world_size} ranks: {self.placement}.", f"  {self.reason}"]
        for other in self.alternatives:
            lines.append(f"  - {other.placement}: {_consequence(other)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The explanation as a JSON-serializable dictionary."""
        return {**asdict(self), "shape": list(self.shape)}


def explain_plan(model: Any, tp_size: int, name: str, *, torch_dtype: Any = None, **kwargs: Any) -> list[Explanation]:
    """Plan a model for ``tp_size`` ranks and explain the placement of everything that ``name`` matches.

    Args:
        model: As for :func:`paraxis.plan_model`.
        tp_size: The number of ranks.
        name: A parameter, a module (explains all its parameters), or a node of the decomposed graph.
        torch_dtype: Dtype of the parameters; by default the config's.
        kwargs: As for :func:`paraxis.plan_model`.
    """
    with plan_offline(model, tp_size, torch_dtype, kwargs) as planned:
        return explain_planned(planned, name)


def explain_planned(planned: Planned, name: str) -> list[Explanation]:
    """Explain an existing plan. See :func:`explain_plan`."""
    planned_name, restore_name = _planned_name(planned, name)
    explainer = _Explainer(planned)
    values = [
        value
        for value, own in planned.solved.program.parameters.items()
        for names in [[own, *planned.ctx.state.aliases.get(own, ())]]
        if any(n == planned_name or n.startswith(f"{planned_name}.") for n in names)
    ]
    found = [explainer.parameter(value) for value in values if value in explainer.sizes]
    if not found:
        found = [
            explainer.unplanned(other, planned.plan.parameters[other])
            for other in planned.plan.unplanned
            if f"{other}.".startswith(f"{planned_name}.")
        ]
    if not found:
        steps = [s for s in planned.solved.program.steps if s.call is not None and s.node.name == planned_name]
        found = [explainer.step(step) for step in steps]
    if not found:
        names = list(planned.solved.program.parameters.values())
        close = get_close_matches(name, [*names, *(n.rpartition(".")[0] for n in names)], 3)
        hint = f" Did you mean {' or '.join(map(repr, dict.fromkeys(close)))}?" if close else ""
        raise ValueError(f"the plan has no parameter, module or node {name!r}.{hint}")
    for each in found:
        each.name = restore_name(each.name)
        for other in each.alternatives:
            other.collectives = [restore_name(text) for text in other.collectives]
    return found


def _planned_name(planned: Planned, name: str) -> tuple[str, Callable[[str], str]]:
    """The name in the planned block, for a name in a block that repeats it, and a function that maps names back."""
    for each in planned.repeated:
        for index, like in each.like.items():
            copy, original = f"{each.path}.{index}.", f"{each.path}.{like}."
            if f"{name}.".startswith(copy):
                found = f"{original}{f'{name}.'.removeprefix(copy)}".removesuffix(".")
                return found, partial(_renamed, original=original, copy=copy)
    return name, lambda n: n


def _renamed(name: str, original: str, copy: str) -> str:
    return f" {name}".replace(f" {original}", f" {copy}")[1:]


class _Explainer:
    """Solves the alternatives of one plan."""

    def __init__(self, planned: Planned) -> None:
        self.solved: Solved = planned.solved
        self.program, self.model = self.solved.program, self.solved.model
        self.reasons = dict(planned.plan.replicated)
        self.axes = weight_axes(self.program)
        self.constraints = Constraints(parse(planned.config.constraints), self.program, planned.ctx.state.aliases)
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
        """Explain a parameter: replicated, and every sharding the solver considers."""
        tensor = self.sizes[value]
        shape = tuple(int(n) for n in tensor.shape)
        chosen = _stored(self.solved.solution.parameters.get(value, REPLICATE))
        others: list[Placement] = [REPLICATE]
        for dim, size in enumerate(shape):
            others += [Shard.of(dim, layout) for layout in self.solved.candidates.layouts(value, dim, size)]
        alternatives = []
        for other in dict.fromkeys(others):
            if other != chosen:
                found = self._alternative(self._text(value, other, shape), _parameter_is(value, other))
                found.bytes = (_numel(other, shape) - _numel(chosen, shape)) * tensor.dtype.itemsize
                alternatives.append(found)
        name = self.program.parameters[value]
        if isinstance(chosen, Shard):
            reason = "Another placement has the same cost:"
            if all(not other.possible or other.cost > 0 for other in alternatives):
                reason = "Every other placement costs more:"
        else:
            reason = f"Replicated because: {self.reasons.get(name, 'sharding it costs more')}."
        return self._explanation(name, shape, self._text(value, chosen, shape), reason, alternatives)

    def unplanned(self, name: str, plan: ParameterPlan) -> Explanation:
        """Explain a parameter that no planned call uses, or whose results nobody reads."""
        dims = plan.placement.layouts if isinstance(plan.placement, Shard) else ()
        where = f"sharded on dimension {dims[0][0]}, for memory" if dims else "replicated"
        reason = "No planned call reads what is computed with it. A call that does gathers it first."
        return self._explanation(name, tuple(plan.global_shape), where, reason, [])

    def _text(self, value: Value, placement: Placement, shape: tuple[int, ...]) -> str:
        if not isinstance(placement, Shard):
            return "replicated"
        dims = [d for d, _ in placement.layouts]
        axes = [axis for axis, d in self.axes.get(value, {}).items() if dims == [d]]
        local = "×".join(map(str, local_shape(placement, shape, 0)))
        layout = ", ".join(str(x) for _, x in placement.layouts)
        form = "" if layout in ("even", "uneven") else f", packed as {layout}" if len(layout) < 80 else ", packed"
        axis = f" ({' or '.join(axes)})" if axes else ""
        return f"sharded on dimension {', '.join(map(str, dims))}{axis}, {local} on rank 0{form}"

    # -- operators ---------------------------------------------------------------------------------------------

    def step(self, step: Step) -> Explanation:
        """Explain the output of an operator: every placement that a search could give it."""
        assert step.call is not None
        chosen = self.solved.solution.strategies[step]
        seen: dict[tuple[Placement, ...], None] = {}

        def collect(
            at: Step, strategy: Strategy, inputs: tuple[InputPlacement, ...], after: tuple[Placement, ...]
        ) -> bool:
            if at is step:
                seen.setdefault(strategy.outputs)
            return self.constraints.permit(at, strategy, inputs, after)

        self._search(collect)
        alternatives = [
            self._alternative(_output_text(outputs), _outputs_are(step, outputs))
            for outputs in seen
            if outputs != chosen.outputs
        ]
        name = f"{captured_module_of(step.node) or 'the model'}: {step.node.name} ({step.call.target})"
        shape = tuple(n if isinstance(n, int) else -1 for n in step.call.outputs[0].shape)
        inputs = ", ".join(map(_placement_text, self.solved.solution.input_placements[step])) or "none"
        reason = f"Its inputs arrive as: {inputs}. It needs them as: {', '.join(map(_placement_text, chosen.inputs))}."
        return self._explanation(name, shape, _output_text(chosen.outputs), reason, alternatives)

    # -- both --------------------------------------------------------------------------------------------------

    def _explanation(
        self, name: str, shape: tuple[int, ...], placement: str, reason: str, alternatives: list[Alternative]
    ) -> Explanation:
        ordered = sorted(alternatives, key=lambda a: (not a.possible, a.cost))
        return Explanation(name, shape, self.program.world, placement, reason, ordered)

    def _search(self, permit: Permit) -> Solution:
        return search(self.program, self.model, self.solved.keep_sharded, self.sequence, permit)[0]

    def _alternative(self, placement: str, fixed: Permit) -> Alternative:
        """The best plan that ``fixed`` permits, compared with the chosen one."""

        def permit(
            step: Step, strategy: Strategy, inputs: tuple[InputPlacement, ...], after: tuple[Placement, ...]
        ) -> bool:
            return fixed(step, strategy, inputs, after) and self.constraints.permit(step, strategy, inputs, after)

        try:
            solution = self._search(permit)
        except Unsatisfiable:
            return Alternative(placement, possible=False)
        costs = account(self.program, solution, self.model)
        return Alternative(
            placement,
            seconds=costs.seconds - self.solved.account.seconds,
            cost=solution.cost - self.solved.solution.cost,
            collectives=self._difference(costs),
        )

    def _difference(self, other: Account) -> list[str]:
        """The collectives that only one of the two plans has."""
        before, after = (Counter(self._collectives(x)) for x in (self.solved.account, other))
        added = [f"{n} more {what}" for what, n in (after - before).items()]
        removed = [f"{n} fewer {what}" for what, n in (before - after).items()]
        return added + removed

    def _collectives(self, costs: Account) -> list[str]:
        return [
            f"{kind.replace('_', '-')} of {_bytes(size)} after {captured_module_of(value.node) or value.node.name}"
            for kind, value, size in costs.sent
        ]


def _parameter_is(value: Value, placement: Placement) -> Permit:
    """Permits only plans in which a parameter has this placement."""

    def permit(
        step: Step, strategy: Strategy, inputs: tuple[InputPlacement, ...], after: tuple[Placement, ...]
    ) -> bool:
        return all(
            _stored(place) == placement
            for v, before, place in zip(step.inputs, inputs, after, strict=True)
            if v == value and isinstance(before, Unplaced)
        )

    return permit


def _outputs_are(step: Step, outputs: tuple[Placement, ...]) -> Permit:
    """Permits only plans in which a step's outputs have these placements."""

    def permit(at: Step, strategy: Strategy, inputs: tuple[InputPlacement, ...], after: tuple[Placement, ...]) -> bool:
        return at is not step or strategy.outputs == outputs

    return permit


def _stored(placement: Placement) -> Placement:
    """The placement of a stored parameter: a shard without layouts (replicated, used in part) is stored replicated."""
    return placement if isinstance(placement, Shard) and placement.layouts else REPLICATE


def _numel(placement: Placement, shape: tuple[int, ...]) -> int:
    total = 1
    for n in local_shape(placement, shape, 0):
        total *= n
    return total


def _output_text(outputs: tuple[Placement, ...]) -> str:
    return "output " + ", ".join(map(_placement_text, outputs))


def _placement_text(placement: InputPlacement) -> str:
    if isinstance(placement, Partial):
        return "partial"
    if isinstance(placement, Shard) and placement.layouts:
        return f"sharded on dimension {', '.join(str(d) for d, _ in placement.layouts)}"
    return "free to choose" if isinstance(placement, Unplaced) else "replicated"


def _consequence(other: Alternative) -> str:
    if not other.possible:
        return "not possible: no operator that uses it supports this placement."
    parts = [f"{other.seconds * 1e6:+.1f} µs per pass"]
    if other.bytes:
        parts.append(f"{'+' if other.bytes > 0 else '-'}{_bytes(abs(other.bytes))} per rank")
    text = ", ".join(parts)
    if other.collectives:
        text += f" ({'; '.join(other.collectives[:4])}{'; ...' if len(other.collectives) > 4 else ''})"
    if other.cost <= 0:
        text += ", the same cost as the chosen placement"
    return text + "."


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
