"""Simulated ranks: shards during a module's forward, collectives after it, errors that release the other ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paraxis.export.simulate import ShardedWeightUsed, run_sharded


def same(name: str) -> str:
    return name


@pytest.mark.parametrize("style", ["column-gathered", "row-split"])
def test_a_bias_is_added_once(style: str) -> None:
    """If every rank added it, a small bias would pass for rounding."""
    linear, x = nn.Linear(8, 4), torch.randn(3, 8)
    for found in run_sharded(linear, {"": style}, 2, same, lambda module: module(x)):
        assert torch.allclose(found, linear(x), atol=1e-6)


def test_the_code_sees_local_sizes() -> None:
    linear = nn.Linear(8, 6)
    shapes = run_sharded(linear, {"": "column"}, 2, same, lambda module: tuple(module(torch.ones(1, 8)).shape))
    assert shapes == [(1, 3), (1, 3)]


def test_a_sharded_weight_has_no_use_outside_its_forward() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.layer.weight.shape == (8, 8) and self.layer.weight.dtype == torch.float32
            return self.layer(x) @ self.layer.weight

    with pytest.raises(ShardedWeightUsed):
        run_sharded(Twice(), {"layer": "column-gathered"}, 2, same, lambda m: m(torch.ones(1, 8)))


def test_a_rank_that_fails_releases_the_others() -> None:
    arrived: list[int] = []

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            arrived.append(1)
            if len(arrived) == 2:
                raise KeyError("one of them")
            return self.layer(x)

    with pytest.raises(KeyError, match="one of them"):
        run_sharded(Uneven(), {"layer": "column-gathered"}, 4, same, lambda m: m(torch.ones(1, 8)))
