"""Inputs of collectives in the tests of this folder."""

from __future__ import annotations

import torch


def values_of(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The input of a rank: small integers, which every dtype sums exactly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)
