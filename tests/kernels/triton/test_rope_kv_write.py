"""RoPE and KV cache writes of prefill as one operator, on a CPU. The kernel itself is tested beside."""

from __future__ import annotations

import pytest
import torch

from paraxis.kernels.triton import rope_kv_write as module  # registers the operator


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-high, low], -1) * sin.unsqueeze(1)


@pytest.mark.parametrize("start", [0, 3])
def test_results_are_rotated_and_written_at_their_positions(start: int) -> None:
    batch, heads, groups, rows, length, features = 2, 4, 2, 5, 11, 8
    torch.manual_seed(0)
    query = torch.randn(batch, heads, rows, features)
    key, value = (torch.randn(batch, groups, rows, features) for _ in range(2))
    angle = torch.rand(1, rows, features // 2).repeat(1, 1, 2)
    inputs = (query, key, value, angle.cos(), angle.sin(), torch.tensor(start))
    found, keys, values = torch.ops.paraxis.rope_kv_write(*inputs, length)
    torch.testing.assert_close(found, rotated(query, angle.cos(), angle.sin()))
    expected = torch.zeros(batch, groups, length, features)
    expected[:, :, start : start + rows] = rotated(key, angle.cos(), angle.sin())
    torch.testing.assert_close(keys, expected)
    assert torch.equal(values[:, :, start : start + rows], value)
    assert not values[:, :, :start].any() and not values[:, :, start + rows :].any()


def test_fake_results_have_the_same_layout() -> None:
    query, key = torch.empty(1, 4, 5, 8), torch.empty(1, 2, 5, 8)
    cos = torch.empty(1, 5, 8)
    inputs = (query, key, key, cos, cos, torch.tensor(0))
    real = torch.ops.paraxis.rope_kv_write(*inputs, 7)
    fake = torch.ops.paraxis.rope_kv_write(*(x.to("meta") for x in inputs), 7)
    allocated = module.allocate(query, key, 7)
    for results in (fake, allocated):
        assert [(x.shape, x.stride()) for x in results] == [(x.shape, x.stride()) for x in real]
