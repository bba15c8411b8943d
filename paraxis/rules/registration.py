"""Registering a rule from outside this package: it is validated against the real operator first."""

from __future__ import annotations

from collections.abc import Callable

from .base import Rule, Samples
from .registry import Registered, StructuresOf, add, overloads_of


def register_rule(
    *targets: object, samples: Samples, free: bool = False, structures: StructuresOf | None = None
) -> Callable[[Rule], Rule]:
    """Register a rule for operators: overloads, or packets (all their overloads that write nothing).

    ``samples`` are calls of the operators (see :func:`sample`), or a function that returns them. The rule is called
    for each sample under many placements, on 2, 3 and 4 simulated ranks. Every strategy it returns is run on shards,
    and values and gradients are compared with those of the unsharded call. :class:`paraxis.UnsoundRuleError` is raised,
    and nothing is registered, if a strategy is wrong, if an overload has no samples, or if no strategy shards a tensor.
    The values of operators that draw random numbers (``torch.Tag.nondeterministic_seeded``) cannot be compared: their
    shapes are, and no element of a result may be on two ranks.

    ``free=True``: the rule handles :data:`UNPLACED` inputs; otherwise it is called once for every candidate placement
    of a parameter. ``structures`` says which inputs can only be split in certain units or segments, so that parameters
    are split the same way; a table says so itself. A later rule for an operator replaces an earlier one.
    """

    def decorate(rule: Rule) -> Rule:
        from .validation.check import prove  # loaded only when somebody registers a rule

        overloads = list(overloads_of(targets))
        prove(overloads, rule, samples, free)
        family = samples if isinstance(samples, str) else ""
        add(overloads, Registered(rule, family, free, structures or getattr(rule, "structures", None)))
        return rule

    return decorate
