"""Random tensors for sample calls."""

from __future__ import annotations

import torch


def f(*shape: int) -> torch.Tensor:
    """Normally distributed numbers, in float64."""
    return torch.randn(shape, dtype=torch.float64)


def i(high: int, *shape: int) -> torch.Tensor:
    """Indices below ``high``."""
    return torch.randint(high, shape)


def b(*shape: int) -> torch.Tensor:
    """A boolean mask."""
    return torch.rand(shape) > 0.5
