"""RoPE and KV cache writes of prefill as one kernel, against the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paraxis.kernels.triton.rope_kv_write import _with_operators

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize(
    "shape",  # batch, query heads, key heads, rows, length, features
    [(1, 4, 1, 100, 164, 128), (2, 3, 3, 33, 40, 64), (2, 4, 2, 5, 70, 16), (1, 32, 8, 2048, 2304, 128)],
)
def test_result_is_that_of_the_operators(shape: Any, start: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch, heads, groups, rows, length, features = shape
    joined = torch.randn(batch, rows, (heads + 2 * groups) * features, device="cuda", dtype=dtype)
    parts = joined.split([heads * features, groups * features, groups * features], -1)
    query, key, value = (x.unflatten(-1, (-1, features)).transpose(1, 2) for x in parts)
    for angles in {1, batch}:
        angle = torch.rand(angles, rows, features // 2, device="cuda").repeat(1, 1, 2) * 6
        inputs = (query, key, value, angle.cos().to(dtype), angle.sin().to(dtype), torch.tensor(start, device="cuda"))
        found, expected = torch.ops.paraxis.rope_kv_write(*inputs, length), _with_operators(*inputs, length)
        exact = _with_operators(*(x.double() for x in inputs[:5]), inputs[5], length)
        for ours, theirs, true in zip(found, expected, exact, strict=True):
            assert ours.stride() == theirs.stride()
            allowed = 1.01 * (theirs.double() - true).abs().max()  # the same rounding, up to fused multiply-adds
            assert (ours.double() - true).abs().max() <= allowed
        assert torch.equal(found[2], expected[2])
        assert not found[1][:, :, :start].any() and not found[1][:, :, start + rows :].any()


def test_memory_layouts() -> None:
    """Features that are not contiguous, cos and sin of different strides."""
    query, key, value = (torch.randn(1, n, 64, 20, device="cuda").transpose(2, 3) for n in (4, 2, 2))
    cos, sin = torch.rand(1, 64, 20, device="cuda").transpose(1, 2), torch.rand(1, 20, 64, device="cuda")
    inputs = (query, key, value, cos, sin, torch.tensor([3], device="cuda"), 32)
    for ours, theirs in zip(torch.ops.paraxis.rope_kv_write(*inputs), _with_operators(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
