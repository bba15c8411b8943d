"""Prefill attention on a CPU: causal, many queries."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from paraxis.kernels.cpu.build import load_kernel
from paraxis.kernels.cpu.prefill_attention import MAX_LENGTH

aten = torch.ops.aten
needs_compiler = pytest.mark.skipif(load_kernel("prefill_attention") is None, reason="needs a C++ compiler")


def inputs(batch: int, heads: int, groups: int, queries: int, length: int, features: int) -> list[torch.Tensor]:
    """Query, keys and values as projections produce them: [batch, rows, heads, features], transposed."""
    torch.manual_seed(queries)
    sizes = ((heads * groups, queries), (heads, length), (heads, length))
    return [torch.randn(batch, rows, n, features).transpose(1, 2) for n, rows in sizes]


def exact(tensors: list[torch.Tensor], scale: float) -> torch.Tensor:
    """torch's attention in float64."""
    doubles = [x.double() for x in tensors]
    return scaled_dot_product_attention(*doubles, is_causal=True, scale=scale, enable_gqa=True)


@needs_compiler
@pytest.mark.parametrize("queries", [1, 5, 6, 16, 17, 100, 512])
@pytest.mark.parametrize(("batch", "heads", "groups", "features"), [(1, 4, 1, 64), (2, 3, 2, 80), (1, 1, 4, 8)])
def test_result_is_that_of_torch(batch: int, heads: int, groups: int, queries: int, features: int) -> None:
    tensors = inputs(batch, heads, groups, queries, queries, features)
    for scale in (features**-0.5, 4.0):  # with the second some weights underflow to zero
        found = torch.ops.paraxis.prefill_attention(*tensors, scale)
        fake = torch.ops.paraxis.prefill_attention(*(x.to("meta") for x in tensors), scale)
        assert (found.shape, found.stride()) == (fake.shape, fake.stride())
        rounding = 2**-23 * scale * 6 * features * float(tensors[2].abs().max())  # the last bit of a large score
        assert float((found - exact(tensors, scale)).abs().max()) <= 2e-6 + rounding


@pytest.mark.parametrize(("queries", "length"), [(7, 30), (30, 7), (3, MAX_LENGTH + 5)])
def test_more_or_fewer_keys_than_queries(queries: int, length: int) -> None:
    """Masked as torch does, from the first key; and lengths for which torch's kernel is used."""
    tensors = inputs(1, 2, 2, queries, length, 16)
    found = torch.ops.paraxis.prefill_attention(*tensors, 0.25)
    torch.testing.assert_close(found.double(), exact(tensors, 0.25), atol=2e-6, rtol=2e-6)


@needs_compiler
def test_memory_layouts_and_threads() -> None:
    """Features that are not contiguous, keys in a preallocated cache, several threads."""
    query, keys, values = inputs(1, 4, 2, 40, 40, 32)
    expected = exact([query, keys, values], 0.2)
    preallocated = [torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, :40] for x in (keys, values)]
    scattered = query.transpose(2, 3).contiguous().transpose(2, 3)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 4, 5):
            torch.set_num_threads(count)
            found = torch.ops.paraxis.prefill_attention(scattered, *preallocated, 0.2)
            torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_default_dtype_broadcast_batches_and_masked_rows() -> None:
    """Another default dtype; batches that torch broadcasts; scores that are all minus infinity."""
    query, keys, values = inputs(2, 2, 1, 9, 9, 16)
    torch.set_default_dtype(torch.float64)
    try:
        found = torch.ops.paraxis.prefill_attention(query, keys, values, 0.25)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found.double(), exact([query, keys, values], 0.25), atol=2e-6, rtol=2e-6)
    for mixed in ([query, keys[:1], values[:1]], [query, keys, values[:1]]):
        found = torch.ops.paraxis.prefill_attention(*mixed, 0.25)
        torch.testing.assert_close(found.double(), exact(mixed, 0.25), atol=2e-6, rtol=2e-6)
    with pytest.raises(RuntimeError):  # fewer query heads than key heads
        torch.ops.paraxis.prefill_attention(query[:, :1], keys, values, 0.25)
    masked = torch.ops.paraxis.prefill_attention(query.abs(), torch.full_like(keys, -torch.inf), values, 0.25)
    assert torch.equal(masked, torch.zeros_like(masked))
