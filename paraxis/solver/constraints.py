"""Constraints on a plan: parameters that must, or must not, have a placement.

A constraint is a pattern of names and a placement: ``{"*.mlp.down_proj": "row", "lm_head": "sharded"}``. The search
finds the cheapest plan in which all constraints hold. If there is none, the error names a smallest set of constraints
that cannot hold together.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from ..errors import ConstraintError
from ..placement import Placement, Shard
from ..rules import InputPlacement, Strategy, Unplaced
from .program import Program, Step, Value

aten = torch.ops.aten
_TRANSPOSES = {aten.t.default, aten.numpy_T.default, aten.permute.default, aten.transpose.int, aten.mT.default}
_MATMULS = {
    aten.linear.default: (1, False),
    aten.addmm.default: (2, True),
    aten.mm.default: (1, True),
    aten.matmul.default: (1, True),
}
"""The position of the weight, and whether its output features are its second dimension."""
AXES = ("column", "row", "vocab")
"""Ways to shard the weight of a layer."""
_RENAMED = {"whole": "replicated", "not whole": "sharded", "split": "sharded", "not split": "replicated"}
"""Words of earlier versions."""


@dataclass(frozen=True)
class Constraint:
    """A placement for the parameters whose name, or whose module's name, matches a pattern.

    ``placement`` is "column", "row" or "vocab" (for the weights of layers), "shard(0)" and so on (for any parameter),
    "sharded" (on any dimension) or "replicated"; ``forbidden`` negates it.
    """

    pattern: str
    placement: str
    forbidden: bool = False

    def __str__(self) -> str:
        return f"{self.pattern!r}: {'not ' if self.forbidden else ''}{self.placement}"

    def matches(self, names: Iterable[str]) -> bool:
        """Whether the constraint applies to a parameter with these names."""
        return any(fnmatchcase(n, self.pattern) or fnmatchcase(n.rpartition(".")[0], self.pattern) for n in names)

    def holds(self, placement: Placement, axes: Mapping[str, int]) -> bool:
        """Whether a parameter may have a placement; ``axes`` says which dimension each axis of its layer shards."""
        dims = {d for d, _ in placement.layouts} if isinstance(placement, Shard) else set()
        if self.placement == "replicated":
            found = not dims
        elif self.placement == "sharded":
            found = bool(dims)
        elif self.placement in AXES:
            found = dims == {axes[self.placement]}
        else:
            found = dims == {int(self.placement[6:-1])}
        return found != self.forbidden


def parse(constraints: Mapping[str, str | Sequence[str]] | None) -> list[Constraint]:
    """Constraints from ``{pattern: placement}``, or a list of placements for one pattern."""
    found = []
    for pattern, texts in (constraints or {}).items():
        for text in [texts] if isinstance(texts, str) else texts:
            words = _current_words(pattern, " ".join(text.lower().split()))
            forbidden = words.startswith("not ")
            placement = words.removeprefix("not ").replace(" ", "")
            if placement not in (*AXES, "sharded", "replicated") and not re.fullmatch(r"shard\(\d+\)", placement):
                raise ConstraintError(
                    f"constraint {pattern!r}: {text!r} is not a placement: use 'column', 'row', 'vocab', 'sharded', "
                    "'replicated' or 'shard(DIM)', or one of these after 'not'."
                )
            found.append(Constraint(pattern, placement, forbidden))
    return found


def _current_words(pattern: str, words: str) -> str:
    """The words of a constraint, those of earlier versions replaced, with a warning."""
    current = _RENAMED.get(words)
    if current is None:
        return words
    warnings.warn(
        f"constraint {pattern!r}: {words!r} is now called {current!r}; the old word will not be accepted in the next "
        "version",
        DeprecationWarning,
        stacklevel=3,
    )
    return current


class Constraints:
    """Constraints, applied to the parameters of a program. ``aliases``: more names of a parameter."""

    def __init__(
        self, constraints: Sequence[Constraint], program: Program, aliases: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.axes = weight_axes(program)
        self.by_value: dict[Value, list[Constraint]] = {}
        for constraint in constraints:
            for value, name in program.parameters.items():
                names = [name, *(aliases or {}).get(name, ())]
                if constraint.matches(names) and self._applies(constraint, value):
                    self.by_value.setdefault(value, []).append(constraint)

    def _applies(self, constraint: Constraint, value: Value) -> bool:
        """Only the weight of a layer has axes; its bias follows."""
        return constraint.placement not in AXES or constraint.placement in self.axes.get(value, {})

    def permit(
        self, step: Step, strategy: Strategy, before: tuple[InputPlacement, ...], after: tuple[Placement, ...]
    ) -> bool:
        """Whether a step violates no constraint on the parameters that it places."""
        return all(
            constraint.holds(placement, self.axes.get(value, {}))
            for value, previous, placement in zip(step.inputs, before, after, strict=True)
            if isinstance(previous, Unplaced)
            for constraint in self.by_value.get(value, ())
        )


def check_names(constraints: Sequence[Constraint], names: Mapping[str, Sequence[str]]) -> None:
    """Raise if a constraint applies to no parameter; ``names`` has all names of each."""
    known = [name for of_one in names.values() for name in of_one]
    for constraint in constraints:
        if not any(constraint.matches(of_one) for of_one in names.values()):
            close = difflib.get_close_matches(constraint.pattern, [*known, *(n.rpartition(".")[0] for n in known)], 3)
            hint = f" Did you mean {' or '.join(map(repr, dict.fromkeys(close)))}?" if close else ""
            raise ConstraintError(f"constraint {constraint}: no parameter or module matches this name.{hint}")


def check_axes(constraints: Sequence[Constraint], applied: Constraints, program: Program) -> None:
    """Raise if a constraint names an axis for parameters that are not the weights of such a layer."""
    effective = {constraint for of_one in applied.by_value.values() for constraint in of_one}
    for constraint in constraints:
        matching = [n for n in program.parameters.values() if constraint.matches([n])]
        if constraint.placement in AXES and constraint not in effective and matching:
            raise ConstraintError(
                f"constraint {constraint}: {matching[0]} is not the weight of a layer that can be "
                f"{constraint.placement}-parallel: 'column' and 'row' are for linear layers, 'vocab' for embeddings. "
                "Name a dimension: 'shard(0)'."
            )


def weight_axes(program: Program) -> dict[Value, dict[str, int]]:
    """For the weights of layers, the dimension that each axis shards."""
    found: dict[Value, dict[str, int]] = {}
    views: dict[Value, tuple[Value, bool]] = {v: (v, False) for v in program.parameters}
    """For parameters and their transposes: the parameter, and whether it is transposed."""
    for step in program.steps:
        if step.call is None:
            continue
        target = step.call.target
        if target in _TRANSPOSES and step.inputs[0] in views and step.call.out.ndim == 2:
            parameter, transposed = views[step.inputs[0]]
            views[step.outputs[0]] = (parameter, not transposed)
        elif target is aten.embedding.default and step.inputs[0] in views:
            found.setdefault(views[step.inputs[0]][0], {})["vocab"] = 0
        elif target in _MATMULS and len(step.inputs) > _MATMULS[target][0]:
            position, outputs_last = _MATMULS[target]
            if step.inputs[position] in views and step.call.inputs[position].ndim == 2:
                parameter, transposed = views[step.inputs[position]]
                out = int(outputs_last != transposed)
                found.setdefault(parameter, {}).update(column=out, row=1 - out)
    return found
