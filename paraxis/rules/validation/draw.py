"""Tensors for sample calls."""

from __future__ import annotations

import torch


def f(*shape: int) -> torch.Tensor:
    """Numbers, in float64."""
    return torch.randn(shape, dtype=torch.float64)


def i(high: int, *shape: int) -> torch.Tensor:
    """Indices below ``high``."""
    return torch.randint(high, shape)


def b(*shape: int) -> torch.Tensor:
    """A mask."""
    return torch.rand(shape) > 0.5
