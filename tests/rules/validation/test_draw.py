"""Random tensors for sample calls."""

from __future__ import annotations

import torch

from paraxis.rules.validation.draw import b, f, i


def test_dtypes_and_ranges() -> None:
    assert f(4, 6).dtype == torch.float64 and f(4, 6).shape == (4, 6) and f().shape == ()
    assert i(3, 100).dtype == torch.int64 and set(i(3, 100).tolist()) == {0, 1, 2}
    assert b(4, 6).dtype == torch.bool
