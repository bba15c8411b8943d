"""What the tests of rule families share: validating the sample calls of a family, and asking for a strategy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paraxis.placement import Layout
from paraxis.rules import InputPlacement, Strategy, rule_for
from paraxis.rules.validation import check
from paraxis.rules.validation.run import call_of
from paraxis.rules.validation.samples import FAMILIES

HALVES = Layout.even(8, 2)


def validate(family: str, replicated: Collection[str] = ()) -> None:
    """Every strategy for every sample call is right, and there is one, except for the calls named in ``replicated``."""
    torch.manual_seed(0)
    for op, args, kwargs in FAMILIES[family]():
        report = check(op, *args, skip_kinds=("vocab",), gradients=(2,), **kwargs)
        assert not report.wrong, "\n".join(report.wrong[:5])
        shape = next(tuple(t.shape) for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
        if not report.checked:
            assert f"{op} {shape}" in replicated or max(shape, default=1) == 1, f"no strategy for {op} {shape}"


def strategies(
    op: Any, args: Sequence[Any], placements: Sequence[InputPlacement], world: int = 2, **kwargs: Any
) -> list[Strategy]:
    """The strategies of the registered rule for a call whose inputs are placed like this."""
    call, _ = call_of(op, args, kwargs, world)
    rule = rule_for(op)
    assert rule is not None
    return list(rule(call, placements))


def assert_offers(op: Any, args: Sequence[Any], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    """Among the right strategies for a call on two ranks is one with these placements, as text."""
    checked = {(i, o) for i, o, _ in check(op, *args, worlds=(2,), skip_kinds=("vocab",)).checked}
    assert (inputs, outputs) in checked, f"{sorted(checked)}"
