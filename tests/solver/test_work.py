"""How much matmul work an operator is, against torch's own counter, and how much of it a rank does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paraxis.placement import PARTIAL, REPLICATE, Layout, Shard
from paraxis.rules import Strategy
from paraxis.rules.validation.run import call_of
from paraxis.solver import CostModel
from paraxis.solver.work import local_fraction, matmul_flops

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.linear.default, (image(2, 3, 8), image(6, 8), image(6))),
    (aten.mm.default, (image(3, 8), image(8, 6))),
    (aten.bmm.default, (image(2, 3, 8), image(2, 8, 6))),
    (aten.addmm.default, (image(6), image(3, 8), image(8, 6))),
    (aten.convolution.default, (image(1, 3, 8, 8), image(6, 3, 4, 4), None, (4, 4), (0, 0), (1, 1), False, (0, 0), 1)),
    (aten.convolution.default, (image(1, 4, 9), image(8, 2, 3), None, (1,), (0,), (1,), False, (0,), 2)),
    (aten.convolution.default, (image(1, 3, 9), image(3, 5, 3), None, (2,), (0,), (1,), True, (0,), 1)),
    (aten.scaled_dot_product_attention.default, (image(1, 4, 5, 8), image(1, 4, 7, 8), image(1, 4, 7, 6))),
]


@pytest.mark.parametrize(("target", "args"), CALLS)
def test_flops_are_those_that_torch_counts(target: Any, args: tuple[Any, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        target(*args)
    assert matmul_flops(call_of(target, args, {}, 2)[0]) == counter.get_total_flops() > 0


def test_other_operators_are_no_matmul_work() -> None:
    assert matmul_flops(call_of(aten.add.Tensor, (image(4, 4), image(4, 4)), {}, 2)[0]) == 0
    assert matmul_flops(call_of(aten.embedding.default, (image(8, 4), torch.tensor([1, 2])), {}, 2)[0]) == 0


def test_the_fraction_of_a_rank() -> None:
    """That of its rows, columns, or of the inner dimension where the result is partial."""
    model, columns = CostModel(world=2), Shard.of(1, Layout.even(6, 2))
    column = Strategy((REPLICATE, Shard.of(0, Layout.even(6, 2))), (columns,))
    uneven = Strategy((REPLICATE, Shard.of(0, Layout.even(5, 2))), (Shard.of(1, Layout.even(5, 2)),))
    row = Strategy((Shard.of(1, Layout.even(8, 2)), Shard.of(1, Layout.even(8, 2))), (PARTIAL,))
    full = Strategy((REPLICATE, REPLICATE), (REPLICATE,))
    passed_on = Strategy((PARTIAL, REPLICATE), (PARTIAL,))
    fractions = [local_fraction(each, model) for each in (column, uneven, row, full, passed_on)]
    assert fractions == [0.5, 0.6, 0.5, 1.0, 1.0]
