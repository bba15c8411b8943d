"""Unscaling the gradients of sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensor.sharded import PLACEMENTS, random_tensor, sharded


def unscaled(infinite_on: int | None) -> float:
    found = torch.zeros(())
    gradients = [sharded(random_tensor(), p) for p in PLACEMENTS.values()]
    if dist.get_rank() == infinite_on:
        gradients[0].local[0, 0] = torch.inf
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.5))
    for gradient in gradients[1:]:
        assert torch.allclose(gradient.full_tensor(), random_tensor() / 2)
    return float(found)


@pytest.mark.parametrize(("infinite_on", "expected"), [(None, 0.0), (1, 1.0)])
def test_infinity_on_one_rank_is_found_on_all(ranks: Any, infinite_on: int | None, expected: float) -> None:
    assert ranks(2).run(unscaled, infinite_on) == [expected, expected]
