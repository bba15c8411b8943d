"""Quantizing to integers, and blocks of rows and columns."""

from __future__ import annotations

import pytest
import torch

from paraxis.weights.quantized.integers import as_blocks, from_blocks, integer_encoding, quantize_integers


def test_blocks_of_sizes_that_do_not_divide() -> None:
    weight = torch.arange(35.0).view(5, 7)
    tiles = as_blocks(weight, (2, 4))
    assert tiles.shape == (3, 2, 2, 4) and torch.equal(from_blocks(tiles, (5, 7)), weight)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_to_the_nearest(bits: int, symmetric: bool) -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    codes, scales, zeros = quantize_integers(weight, (1, 16), bits, symmetric)
    assert scales.shape == zeros.shape == (6, 3) and int(codes.max()) < 1 << (bits - 1)
    assert symmetric == (not bool(zeros[1:].any()))
    group = torch.arange(40) // 16
    found = (codes.float() - zeros.float()[:, group]) * scales[:, group]
    assert bool(((found - weight).abs() <= scales[:, group] * 0.51 * (2 if symmetric else 1)).all())


def test_what_integers_mean() -> None:
    assert integer_encoding((1, 16), 4, True).table[0] == -8 and integer_encoding((1, 16), 4, False).table[0] == 0
    assert not integer_encoding((1, 16), 8, True).packed
