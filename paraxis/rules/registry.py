"""The registry of rules: which operator has which rule.

The rules of this package are registered by :func:`builtin_rule`, and the tests validate them on a family of sample
calls. Rules from outside are validated before they are registered: see :mod:`paraxis.rules.registration`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..compat.torch import OpOverload, OpOverloadPacket, overload_of, schema_of
from .base import Call, InputPlacement, Rule, Strategy, Structures

StructuresOf = Callable[[Call], Structures]
"""How the inputs of a call must be split, if only in certain units or segments."""


@dataclass(frozen=True)
class Registered:
    """A rule and what else is known about its operator.

    Attributes:
        rule: The rule.
        samples: The family of sample calls in ``rules/validation``, for built-in rules.
        accepts_unplaced: Whether the rule handles :data:`UNPLACED` inputs.
        structures: How inputs must be split, if not anywhere.
    """

    rule: Rule
    samples: str = ""
    accepts_unplaced: bool = False
    structures: StructuresOf | None = None


_registry: dict[Any, Registered] = {}


def add(targets: Iterable[Any], entry: Registered) -> None:
    """Register a rule for operators, in place of those they have."""
    for target in targets:
        _registry[target] = entry


def builtin_rule(
    *targets: Any, samples: str, free: bool = False, structures: StructuresOf | None = None
) -> Callable[[Rule], Rule]:
    """Register a rule of this package for operators: overloads, or packets (all their overloads that write nothing).

    ``samples`` names the family of sample calls in ``rules/validation`` on which the tests validate the rule. ``free``
    and ``structures`` are those of :func:`paraxis.register_rule`.
    """

    def decorate(rule: Rule) -> Rule:
        add(overloads_of(targets), Registered(rule, samples, free, structures or getattr(rule, "structures", None)))
        return rule

    return decorate


def register_replicated(*targets: Any, samples: str = "") -> None:
    """Register operators that always run replicated, because that is what they mean: a mark, a new tensor.

    There is nothing to validate. The plan does not list them as operators without a rule.
    """
    add(overloads_of(targets), Registered(_always_replicated, samples))


def _always_replicated(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Nothing but the replicated strategy."""
    return ()


def unregister(target: Any) -> None:
    """Remove the rule of an operator, if it has one: from now on it runs replicated."""
    for overload in overloads_of([target]):
        _registry.pop(overload, None)


@contextmanager
def temporary_rules() -> Iterator[None]:
    """Undo all registrations at the end of the block: for tests and experiments."""
    before = dict(_registry)
    try:
        yield
    finally:
        _registry.clear()
        _registry.update(before)


def overloads_of(targets: Iterable[Any]) -> Iterator[Any]:
    """The operator overloads of packets, overloads and the results of ``torch.library.custom_op``."""
    for target in targets:
        target = overload_of(target)
        if isinstance(target, OpOverloadPacket):
            for name in target.overloads():
                overload = getattr(target, name)
                if not schema_of(overload).is_mutable:  # rules are about functional graphs
                    yield overload
        else:
            yield target


def registered() -> dict[Any, Registered]:
    """All operators that have a rule, with their rules."""
    return dict(_registry)


def rule_for(target: Any) -> Rule | None:
    """The rule of an operator; None if it has none and therefore runs replicated."""
    entry = _entry(target)
    return entry.rule if entry is not None else None


def structures_for(call: Call) -> Structures:
    """How the rule of an operator wants its inputs split, where not every split is allowed."""
    entry = _registry.get(call.target)
    return entry.structures(call) if entry is not None and entry.structures is not None else {}


def accepts_unplaced(target: Any) -> bool:
    """Whether the rule of an operator handles :data:`UNPLACED` inputs; otherwise it is called for every candidate."""
    entry = _entry(target)
    return entry is not None and entry.accepts_unplaced


def _entry(target: Any) -> Registered | None:
    """The entry of an operator, or of any pointwise one where it is pointwise but has no entry.

    That is so for operators that torch tags as pointwise and that were loaded after the rules, and for autograd
    functions that are pointwise forward and backward. Functions that a graph has one of per call have the entry of
    their class.
    """
    entry = _registry.get(target) or _registry.get(type(target))
    if entry is not None:
        return entry
    if isinstance(target, OpOverload):
        pointwise = torch.Tag.pointwise in target.tags and not schema_of(target).is_mutable
    else:
        pointwise = getattr(target, "pointwise", False) is True
    return _registry.get(torch.ops.aten.relu.default) if pointwise else None
