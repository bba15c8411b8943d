"""Pointwise operators, broadcasting, and those that draw random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules.families import assert_offers, strategies, validate

from paraxis.placement import Layout, Shard
from paraxis.rules.registry import registered
from paraxis.rules.validation import check
from paraxis.rules.validation.calls import pointwise_overloads, working_call
from paraxis.rules.validation.check import input_placements
from paraxis.rules.validation.draw import b, f
from paraxis.rules.validation.run import call_of

aten = torch.ops.aten


@pytest.mark.filterwarnings("ignore")
def test_every_strategy_for_the_samples_is_right() -> None:
    validate("pointwise")


@pytest.mark.parametrize(
    ("op", "args", "inputs", "outputs"),
    [
        (aten.add.Tensor, (f(4, 8), f(4, 8)), ("P", "P"), ("P",)),
        (aten.add.Tensor, (f(4, 8), f(8)), ("S(1)", "S(0)"), ("S(1)",)),
        (aten.mul.Tensor, (f(4, 8), f(4, 1)), ("S(1)", "R"), ("S(1)",)),
        (aten.mul.Tensor, (f(4, 8), f(4, 8)), ("P", "R"), ("P",)),
        (aten.masked_fill.Scalar, (f(4, 8), b(4, 8), 0), ("S(1)", "S(1)"), ("S(1)",)),
    ],
)
def test_rule_offers_these_placements(op: Any, args: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    assert_offers(op, args, inputs, outputs)


@pytest.mark.filterwarnings("ignore")
def test_every_pointwise_operator() -> None:
    """All operators that torch tags as pointwise, with arguments from their schemas, broadcasting included."""
    torch.manual_seed(0)
    tried, wrong, silent = 0, [], []
    for op in pointwise_overloads(registered()):
        for shapes in ([(8, 1, 4), (6, 4), (8, 6, 1)], [(4, 6)]):
            call = working_call(op, shapes)
            if call is None:
                continue
            report = check(op, *call[0], worlds=(2,), **call[1])
            tried += 1
            wrong += report.wrong[:1]
            if not report.checked:
                silent.append(str(op))
    assert tried > 450 and not silent
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("op", "args"), [(aten.rand_like.default, (f(4, 8),)), (aten.native_dropout.default, (f(4, 8), 0.5, True))]
)
def test_random_operators_have_no_copies(op: Any, args: Any, world: int) -> None:
    """Two ranks would draw different numbers for the same element."""
    call, _ = call_of(op, args, {}, world)
    for placements in input_placements(call, world, free=True):
        for strategy in strategies(op, args, placements, world):
            assert not any(isinstance(p, Shard) and p.has_copies for p in strategy.outputs)


def test_feature_dropout_drops_entire_planes() -> None:
    args = (f(2, 4, 8), 0.5, True)
    assert strategies(aten.feature_dropout.default, args, [Shard.of(1, Layout.even(4, 2))])
    assert not strategies(aten.feature_dropout.default, args, [Shard.of(2, Layout.even(8, 2))])
