"""Decode attention on a paged KV cache, against attention on each sequence alone."""

from __future__ import annotations

import pytest
import torch

from paraxis.compat.paged_attention import Scoring, attend_causal
from paraxis.kernels.cpu.paged_attention import fits, paged_decode


@pytest.mark.parametrize(("heads", "kv_heads", "features"), [(4, 4, 8), (8, 2, 64), (5, 1, 16), (12, 4, 128)])
@pytest.mark.parametrize("window", [0, 5])
def test_sequences_of_any_length(heads: int, kv_heads: int, features: int, window: int) -> None:
    torch.manual_seed(0)
    size, lengths = 8, [1, 8, 9, 70]
    keys, values = (torch.randn(kv_heads, 20 * size, features) for _ in range(2))
    query = torch.randn(6, heads, features)
    blocks = torch.randperm(20)[: 4 * 5].view(4, 5)
    blocks = torch.cat([blocks, torch.randint(0, 20, (4, 4))], 1)
    if not fits(query, keys, values, None, 0.0):
        pytest.skip("no C++ compiler")
    out, rows = torch.zeros(6, heads, features), torch.tensor([4, 0, 2, 5])
    paged_decode(query, keys, values, out, rows, torch.tensor(lengths), blocks, size, 0.2, window)
    for row, length, table in zip(rows.tolist(), lengths, blocks):
        at = (table[:, None] * size + torch.arange(size)).flatten()[:length]
        k, v = keys[:, at].transpose(0, 1), values[:, at].transpose(0, 1)
        right = attend_causal(query[row : row + 1], k, v, length - 1, Scoring(0.2, window))
        torch.testing.assert_close(out[row : row + 1], right, rtol=1e-4, atol=1e-5)
    assert not out[[1, 3]].any(), "other rows are left alone"


def test_other_tensors_are_left_to_torch() -> None:
    x = torch.randn(2, 4, 8)
    assert not fits(x.double(), x.double(), x.double(), None, 0.0)
    assert not fits(x, x, x, torch.zeros(4), 0.0) and not fits(x, x, x, None, 1.0)
    assert not fits(x[..., :6], x[..., :6], x[..., :6], None, 0.0)
