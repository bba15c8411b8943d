"""Gradients of strategies, from simulated ranks."""

from __future__ import annotations

import pytest
import torch
from rules.operators import clipped_backward, gate

from paraxis.placement import PARTIAL, REPLICATE, Layout, Placement, Shard
from paraxis.rules import Strategy
from paraxis.rules.validation.draw import f, i
from paraxis.rules.validation.gradients import gradient_problem
from paraxis.rules.validation.run import Trial

aten = torch.ops.aten
ROWS, COLUMNS = Shard.of(0, Layout.even(4, 2)), Shard.of(1, Layout.even(6, 2))
COPIES = Shard.of(0, Layout.of(4, [[(0, 3)], [(1, 4)]]))


@pytest.mark.parametrize(
    ("inputs", "output"),
    [
        ((ROWS, ROWS), ROWS),
        ((COPIES, COPIES), COPIES),
        ((REPLICATE, PARTIAL), PARTIAL),
        ((REPLICATE, REPLICATE), REPLICATE),
    ],
)
def test_right_gradients(inputs: tuple[Placement, ...], output: Placement) -> None:
    trial = Trial.of(gate, (f(4, 6), f(4, 6)), {}, 2)
    assert gradient_problem(trial, Strategy(inputs, (output,))) is None


def test_a_replicated_input_of_a_sharded_result_has_partial_gradients() -> None:
    trial = Trial.of(aten.mm.default, (f(4, 8), f(8, 6)), {}, 2)
    assert gradient_problem(trial, Strategy((REPLICATE, COLUMNS), (COLUMNS,))) is None


def test_wrong_gradients() -> None:
    trial = Trial.of(clipped_backward, (f(4, 6),), {}, 2)
    found = gradient_problem(trial, Strategy((ROWS,), (ROWS,)))
    assert found == "the gradient of input 0 is not that of the unsharded call"


def test_calls_without_gradients_have_no_problem() -> None:
    trial = Trial.of(aten.bitwise_and.Tensor, (i(9, 4, 6), i(9, 4, 6)), {}, 2)
    assert gradient_problem(trial, Strategy((ROWS, ROWS), (ROWS,))) is None
