"""Packing and unpacking are exact inverses."""

from __future__ import annotations

import pytest
import torch

from paraxis.weights.quantized.bits import pack_int32, pack_pairs, unpack_int32, unpack_pairs

INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)


@pytest.mark.parametrize("order", [(), INTERLEAVED])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_words_of_codes(dim: int, bits: int, order: tuple[int, ...]) -> None:
    order = order if bits == 4 else ()
    torch.manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (16, 24)).to(torch.int32)
    codes = unpack_int32(words, bits, dim, order)
    assert codes.shape[dim] == words.shape[dim] * 32 // bits and int(codes.max()) < 1 << bits
    assert torch.equal(pack_int32(codes, bits, dim, order), words)


def test_the_first_code_is_in_the_low_bits() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8)
    assert pack_int32(codes, 4, 1).item() == -2023406815  # 0x87654321
    assert pack_int32(codes[:, :3], 4, 1).item() == 0x321
    assert unpack_int32(pack_int32(codes, 4, 1, INTERLEAVED), 4, 1).tolist() == [[1, 3, 5, 7, 2, 4, 6, 8]]


@pytest.mark.parametrize("count", [1, 7, 8])
def test_pairs_of_codes(count: int) -> None:
    codes = torch.randint(0, 16, (3, count), dtype=torch.uint8)
    pairs = pack_pairs(codes)
    assert pairs.shape == (3, (count + 1) // 2) and torch.equal(unpack_pairs(pairs, count), codes)
    assert torch.equal(pairs[:, 0] & 15, codes[:, 0])
