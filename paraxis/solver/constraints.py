"""What the user wants of the plan: parameters pinned to a placement, or kept out of one.

A constraint is a pattern of names and a wish: ``{"*.mlp.down_proj": "row", "lm_head": "not whole"}``. The search is
asked for the cheapest plan in which all wishes hold; where there is none, the smallest set of wishes that cannot hold
together is named.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from ..placement import Placement, Shard
from ..rules import InputPlacement, Strategy
from ..rules.base import Unplaced
from .program import Program, Step, Value

aten = torch.ops.aten
_TRANSPOSES = {aten.t.default, aten.numpy_T.default, aten.permute.default, aten.transpose.int, aten.mT.default}
_PRODUCTS = {aten.linear.default: (1, False), aten.addmm.default: (2, True), aten.mm.default: (1, True)}
_PRODUCTS[aten.matmul.default] = (1, True)
AXES = ("column", "row", "vocab")


class ConstraintError(ValueError):
    """A constraint that means nothing for this model, or constraints that cannot hold together."""


@dataclass(frozen=True)
class Constraint:
    """One wish about the parameters whose name, or whose module's name, matches a pattern.

    ``wish`` is "column", "row" or "vocab" (for the weights of layers), "shard(0)" and so on (any parameter), "split"
    (on whichever dimension) or "whole"; ``forbidden`` turns it round.
    """

    pattern: str
    wish: str
    forbidden: bool = False

    def __str__(self) -> str:
        return f"{self.pattern!r}: {'not ' if self.forbidden else ''}{self.wish}"

    def matches(self, names: Iterable[str]) -> bool:
        """Whether it is about the parameter that has these names."""
        return any(fnmatchcase(n, self.pattern) or fnmatchcase(n.rpartition(".")[0], self.pattern) for n in names)

    def holds(self, placement: Placement, axes: Mapping[str, int]) -> bool:
        """Whether a placement is as wished; ``axes`` are the dimensions that the axes of its layer stand for."""
        dims = {d for d, _ in placement.layouts} if isinstance(placement, Shard) else set()
        if self.wish == "whole":
            held = not dims
        elif self.wish == "split":
            held = bool(dims)
        elif self.wish in AXES:
            held = dims == {axes[self.wish]}
        else:
            held = dims == {int(self.wish[6:-1])}
        return held != self.forbidden


def parse(wishes: Mapping[str, str | Sequence[str]] | None) -> list[Constraint]:
    """Constraints from ``{pattern: wish}``; several wishes for one pattern are a list."""
    found = []
    for pattern, texts in (wishes or {}).items():
        for text in [texts] if isinstance(texts, str) else texts:
            wish = text.strip().lower().replace(" ", "")
            forbidden = text.strip().lower().startswith("not ")
            wish = wish[3:] if forbidden else wish
            if wish not in (*AXES, "whole", "split") and not re.fullmatch(r"shard\(\d+\)", wish):
                raise ConstraintError(
                    f"constraint {pattern!r}: {text!r} is not a wish: use 'column', 'row', 'vocab', 'whole', 'split' "
                    "or 'shard(DIM)', or one of these after 'not'."
                )
            found.append(Constraint(pattern, wish, forbidden))
    return found


class Constraints:
    """The constraints as they apply to the parameters of a program. ``aliases``: more names of a parameter."""

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
        """An axis is one of a layer's weight; its bias follows."""
        return constraint.wish not in AXES or constraint.wish in self.axes.get(value, {})

    def permit(
        self, step: Step, strategy: Strategy, given: tuple[InputPlacement, ...], after: tuple[Placement, ...]
    ) -> bool:
        """Whether a step places no parameter against the wishes."""
        return all(
            wish.holds(place, self.axes.get(value, {}))
            for value, before, place in zip(step.inputs, given, after, strict=True)
            if isinstance(before, Unplaced)
            for wish in self.by_value.get(value, ())
        )


def check_names(constraints: Sequence[Constraint], names: Mapping[str, Sequence[str]]) -> None:
    """Raise if a constraint is about no parameter at all; ``names`` are all the names of each."""
    known = [name for several in names.values() for name in several]
    for constraint in constraints:
        if not any(constraint.matches(several) for several in names.values()):
            close = difflib.get_close_matches(constraint.pattern, [*known, *(n.rpartition(".")[0] for n in known)], 3)
            hint = f" Did you mean {' or '.join(map(repr, dict.fromkeys(close)))}?" if close else ""
            raise ConstraintError(f"constraint {constraint}: no parameter or module has such a name.{hint}")


def check_axes(constraints: Sequence[Constraint], wishes: Constraints, program: Program) -> None:
    """Raise if an axis is asked of parameters that are no weights of such a layer."""
    applied = {constraint for several in wishes.by_value.values() for constraint in several}
    for constraint in constraints:
        about = [n for n in program.parameters.values() if constraint.matches([n])]
        if constraint.wish in AXES and constraint not in applied and about:
            raise ConstraintError(
                f"constraint {constraint}: {about[0]} is not the weight of a layer that can be "
                f"{constraint.wish}-parallel: 'column' and 'row' are for linear layers, 'vocab' for embeddings. Name a "
                "dimension: 'shard(0)'."
            )


def weight_axes(program: Program) -> dict[Value, dict[str, int]]:
    """For weights of layers, the dimension that each axis splits."""
    found: dict[Value, dict[str, int]] = {}
    turned: dict[Value, tuple[Value, bool]] = {v: (v, False) for v in program.parameters}
    for step in program.steps:
        if step.call is None:
            continue
        target = step.call.target
        if target in _TRANSPOSES and step.inputs[0] in turned and step.call.out.ndim == 2:
            source, flipped = turned[step.inputs[0]]
            turned[step.outputs[0]] = (source, not flipped)
        elif target is aten.embedding.default and step.inputs[0] in turned:
            found.setdefault(turned[step.inputs[0]][0], {})["vocab"] = 0
        elif target in _PRODUCTS and len(step.inputs) > _PRODUCTS[target][0]:
            position, across = _PRODUCTS[target]
            if step.inputs[position] in turned and step.call.inputs[position].ndim == 2:
                value, flipped = turned[step.inputs[position]]
                out = int(across != flipped)
                found.setdefault(value, {}).update(column=out, row=1 - out)
    return found
