"""Parameters are compared by checksum, then by value: rounding is no error. ``tests/runtime/test_check_ranks.py`` has
the comparison of a full model."""

from __future__ import annotations

import torch
from torch import nn

from paraxis.weights.compare_parameters import _distance, context_of


def test_distance_is_relative_to_the_largest_value() -> None:
    x = torch.tensor([1.0, -100.0])
    assert _distance(x, x) == 0.0
    assert abs(_distance(x, x + torch.tensor([1.0, 0.0])) - 0.01) < 1e-6
    assert _distance(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])) == 0.0
    assert _distance(torch.tensor([float("nan"), 1.0]), torch.tensor([2.0, 1.0])) == float("inf")
    assert _distance(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    assert _distance(torch.ones(0), torch.ones(0)) == 0.0


def test_other_modules_have_no_ranks() -> None:
    assert context_of(nn.Linear(2, 2)) is None
