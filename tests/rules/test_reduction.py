"""Reductions, softmaxes, sorts and scans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules.families import assert_offers, strategies, validate

from paraxis.placement import PARTIAL, Layout, Shard
from paraxis.rules.validation.draw import f

aten = torch.ops.aten


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["reduction", "line"])
def test_every_strategy_for_the_samples_is_right(family: str) -> None:
    validate(family)


@pytest.mark.parametrize(
    ("op", "args", "inputs", "outputs"),
    [
        (aten.sum.dim_IntList, (f(4, 8), [1]), ("S(1)",), ("P",)),
        (aten.mean.dim, (f(4, 8), [-1], True), ("S(1)",), ("P",)),
    ],
)
def test_rule_offers_these_placements(op: Any, args: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    assert_offers(op, args, inputs, outputs)


def test_copies_are_not_summed() -> None:
    """Features that are on two ranks would be summed twice."""
    copies = Shard.of(1, Layout.even(8, 4, unit=4))
    found = strategies(aten.sum.dim_IntList, (f(2, 8), [1]), [copies], world=4)
    assert all(PARTIAL not in s.outputs for s in found)
