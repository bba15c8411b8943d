"""Layers with their own forward, run on DTensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paraxis.export.layers import failing_layers


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class Mixed(nn.Linear):
    """Mixes the weight with a plain tensor, which a DTensor refuses."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(8) @ self.weight.T


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.mixed, self.unused = Scaled(8, 8), Mixed(8, 8), Scaled(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.scaled(x))


def test_a_forward_must_run_on_a_sharded_weight() -> None:
    found = failing_layers(Model(), {"scaled", "mixed", "unused"}, {"x": torch.ones(2, 8)}, 2)
    assert set(found) == {"mixed", "unused"} and found["unused"] == "it is not called"
    assert found["mixed"].startswith("the forward of Mixed does not run on a sharded weight (")
