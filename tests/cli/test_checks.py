"""The comparison of a parallel model with the unsharded one."""

from __future__ import annotations

import torch

from paraxis.cli._checks import Outputs, checks_table, compare


def outputs(shift: float, token: int) -> Outputs:
    ones = torch.ones(2, 3)
    return Outputs({"logits": ones + shift}, ones.sum() + shift, {"w": ones, "b": None}, torch.tensor([[token]]))


def test_differences_are_found() -> None:
    same = compare(outputs(0.0, 1), outputs(0.0, 1))
    assert all(check.passed for check in same)
    other = compare(outputs(1e-3, 2), outputs(0.0, 1))
    assert [check.passed for check in other] == [False, False, True, False]
    assert not compare(Outputs(), outputs(0.0, 1))[0].passed, "a missing output differs"
    assert checks_table([same, other]).row_count == 4


def test_missing_and_nan_gradients_differ() -> None:
    for gradient in (None, torch.full((2, 3), float("nan"))):
        other = outputs(0.0, 1)
        other.gradients = {"w": gradient, "b": None}
        assert not compare(other, outputs(0.0, 1))[2].passed
