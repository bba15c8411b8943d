"""Decode attention on a GPU against torch's, with and without fused RoPE and KV cache writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = [
    # batch, key heads, query heads of each, length, features
    (1, 1, 4, 700, 128),
    (2, 2, 1, 37, 64),
    (2, 1, 3, 300, 16),
    (1, 2, 1, 9000, 64),
]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bool", "float", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_result_is_that_of_the_operators(shape: Any, kind: str, dtype: torch.dtype) -> None:
    from paraxis.kernels.triton.decode_attention import decode_attention, rope_decode_attention

    torch.manual_seed(0)
    causal = kind == "causal"
    batch, heads, groups, length, features = shape

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=dtype)

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q.double(), k, v, mask.double() if kind == "float" else mask, scale=0.2)

    keys, values = draw(batch, heads, length, features), draw(batch, heads, length, features)
    query = draw(batch, heads * groups, 1, features)
    key, value = draw(batch, heads, 1, features), draw(batch, heads, 1, features)
    angle = torch.rand(batch, 1, 1, features // 2, device="cuda").repeat(1, 1, 1, 2) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    position = torch.tensor([length * 2 // 3], device="cuda")
    seen = (torch.arange(length, device="cuda") <= position).view(1, 1, 1, length)
    mask = seen if kind != "float" else torch.zeros(seen.shape, device="cuda", dtype=dtype).masked_fill(~seen, -1e4)
    close = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}

    found = decode_attention(query, keys, values, *((None, position) if causal else (mask, None)), 0.2)
    torch.testing.assert_close(found.double(), exact(query, keys, values), **close)
    key_cache, value_cache = keys.clone(), values.clone()
    if causal:  # nobody reads what comes later
        key_cache[:, :, position + 1 :] = value_cache[:, :, position + 1 :] = float("nan")
        keys[:, :, position + 1 :] = values[:, :, position + 1 :] = 0.0
    args = (query, key, value, cos, sin, key_cache, value_cache, position, None if causal else mask, causal, 0.2)
    found = rope_decode_attention(*args)
    key_cache, value_cache = key_cache.nan_to_num(), value_cache.nan_to_num()
    keys[:, :, position], values[:, :, position] = rotated(key, cos, sin), value
    torch.testing.assert_close(
        key_cache,
        keys,
        rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-6,
        atol=1e-2 if dtype == torch.bfloat16 else 1e-6,
    )
    assert torch.equal(value_cache, values)
    torch.testing.assert_close(found.double(), exact(rotated(query, cos, sin), keys, values), **close)


def test_result_is_zero_where_every_key_is_masked() -> None:
    from paraxis.kernels.triton.decode_attention import decode_attention

    keys = torch.randn(1, 1, 200, 64, device="cuda")
    mask = torch.zeros(1, 1, 1, 200, device="cuda", dtype=torch.bool)
    found = decode_attention(torch.randn(1, 2, 1, 64, device="cuda"), keys, keys, mask, None, 1.0)
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("shared_memory", [48 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize("key_bytes", [32, 256, 1024])
@pytest.mark.parametrize("groups", [1, 8, 40, 300])
def test_tiles_fit_into_shared_memory(groups: int, key_bytes: int, shared_memory: int) -> None:
    from paraxis.kernels.triton.decode_attention import tiles

    found = tiles(groups, 1000, key_bytes, shared_memory)
    assert found.block == 16 or 2 * found.stages * found.block * key_bytes <= shared_memory
    assert 1 <= found.splits <= -(-1000 // found.block)
