"""Matmuls and linear layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules.families import assert_offers, strategies, validate

from paraxis.placement import PARTIAL, REPLICATE, Layout, Shard
from paraxis.rules.validation.draw import f

aten = torch.ops.aten

REPLICATED = {
    "aten.addmm.default (4, 12)",  # adds a matrix, not a bias
    "aten.addmm.default (12,)",  # with beta and alpha
    "aten.linear.default (4, 8)",  # the weight is a vector
    "aten.matmul.default (8,)",  # a vector times a batch of matrices
    "aten.matmul.default (4, 8)",  # a matrix times a vector
}
"""Sample calls without a sharded strategy."""


def test_every_strategy_for_the_samples_is_right() -> None:
    validate("matmul", REPLICATED)


@pytest.mark.parametrize(
    ("op", "args", "inputs", "outputs"),
    [
        (aten.linear.default, (f(2, 8), f(12, 8), f(12)), ("R", "S(0)", "S(0)"), ("S(1)",)),
        (aten.linear.default, (f(2, 8), f(12, 8), f(12)), ("S(1)", "S(1)", "P"), ("P",)),
        (aten.addmm.default, (f(12), f(2, 8), f(8, 12)), ("S(0)", "R", "S(1)"), ("S(1)",)),
        (aten.matmul.default, (f(2, 8), f(8, 6)), ("S(1)", "S(0)"), ("P",)),
        (aten.linalg_inv_ex.default, (f(4, 6, 5, 5),), ("S(1)",), ("S(1)", "S(1)")),
    ],
)
def test_rule_offers_these_placements(op: Any, args: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    assert_offers(op, args, inputs, outputs)


@pytest.mark.parametrize(
    ("op", "args", "dims"),
    [
        (aten.linear.default, (f(2, 8), f(6, 8)), (1, 1)),
        (aten.addmm.default, (f(6), f(2, 8), f(8, 6)), (None, 1, 0)),
        (aten.matmul.default, (f(2, 8), f(8, 6)), (1, 0)),
        (aten.bmm.default, (f(4, 2, 8), f(4, 8, 6)), (2, 1)),
    ],
)
def test_copies_are_not_summed(op: Any, args: Any, dims: tuple[int | None, ...]) -> None:
    """Features that are on two ranks would be summed twice."""
    copies = Layout.even(8, 4, unit=4)
    placements = [REPLICATE if d is None else Shard.of(d, copies) for d in dims]
    assert all(PARTIAL not in s.outputs for s in strategies(op, args, placements, world=4))
