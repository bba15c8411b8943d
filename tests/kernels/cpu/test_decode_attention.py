"""Decode attention on a CPU, which appends to the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from paraxis.kernels.cpu.build import load_kernel
from paraxis.optimize.kv_cache_append import attend_extended

pytestmark = pytest.mark.skipif(load_kernel("decode_attention") is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def draw(batch: int, heads: int, groups: int, features: int, strided: bool = False) -> list[torch.Tensor]:
    """A query, a new key and a new value."""
    several = [torch.randn(batch, n, 1, features) for n in (heads * groups, heads, heads)]
    if not strided:
        return several
    packed = torch.cat([x.transpose(1, 2).flatten(2) for x in several], 2)  # as one projection produces them
    parts = packed.split([x.shape[1] * features for x in several], 2)
    return [part.unflatten(2, (-1, features)).transpose(1, 2) for part in parts]


def exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """torch's attention in float64."""
    doubles = [x.double() for x in (query, keys, values)]
    return scaled_dot_product_attention(*doubles, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "features"),
    [(1, 8, 1, 64), (2, 3, 2, 80), (3, 1, 4, 128), (1, 2, 1, 8), (1, 2, 3, 264)],
)
def test_result_is_that_of_torch(
    batch: int, heads: int, groups: int, features: int, strided: bool, compiled: bool
) -> None:
    """While the KV cache is reallocated several times, and with scores so far apart that weights underflow."""
    keys = values = torch.tensor([])
    expected = [torch.empty(batch, heads, 0, features) for _ in range(2)]
    torch.manual_seed(0)
    for step in range(300):
        query, key, value = draw(batch, heads, groups, features, strided)
        query = query * (30 if step % 7 == 0 else 1)
        inputs = (query, keys, values, key, value)
        fake = torch.ops.paraxis.attend_appended(*(x.to("meta") for x in inputs), 0.3)
        found, keys, values = (torch.ops.paraxis.attend_appended if compiled else attend_extended)(*inputs, 0.3)
        expected = [torch.cat([past, new], 2) for past, new in zip(expected, (key, value), strict=True)]
        assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
        if compiled:
            assert [(x.shape, x.stride()) for x in (found, keys, values)] == [(x.shape, x.stride()) for x in fake]
        if step in (0, 1, 2, 6, 63, 64, 70, 127, 128, 140, 299):
            scores = 0.3 * query @ expected[0].repeat_interleave(groups, 1).transpose(2, 3)
            rounding = 2**-23 * float(scores.abs().max() * expected[1].abs().max())  # the last bit of a score
            off = float((found - exact(query, *expected, 0.3)).abs().max())
            assert off <= 1e-6 + rounding, f"off by {off}"


@pytest.mark.parametrize("attend", [torch.ops.paraxis.attend_appended, attend_extended])
def test_caches_that_branch_repeat_or_differ(attend: Any) -> None:
    """Two continuations of one cache; an expanded cache; one in half precision; keys and values of other lengths."""
    query, key, value = draw(1, 2, 2, 16)
    _, keys, values = attend(query, torch.tensor([]), torch.tensor([]), key, value, 1.0)
    again = [attend(query, keys, values, new, value, 1.0) for new in (key + 1, key - 1)]
    for (found, longer, _), new in zip(again, (key + 1, key - 1), strict=True):
        assert torch.equal(longer, torch.cat([key, new], 2))
        expected = exact(query, longer, torch.cat([value, value], 2), 1.0)
        torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)
    _, *short = attend(query, torch.tensor([]), torch.tensor([]), key, value, 1.0)
    three = [x.repeat(3, 1, 1, 1) + torch.arange(3.0)[:, None, None, None] for x in (query, key, value)]
    _, longer, _ = attend(three[0], *(x.expand(3, -1, -1, -1) for x in short), *three[1:], 1.0)
    assert torch.equal(longer, torch.cat([key.repeat(3, 1, 1, 1), three[1]], 2))
    half = [x.bfloat16() for x in (keys, values)]
    found, longer, _ = attend(query, *half, key, value, 1.0)
    assert torch.equal(longer, torch.cat([half[0].float(), key], 2))
    with pytest.raises(RuntimeError, match="keys of shape"):
        attend(query, again[0][1], values, key, value, 1.0)


def test_dispatch_modes_see_attention_of_torch() -> None:
    """Under a dispatch mode, such as a FLOP counter, torch's own operator runs."""
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    query, key, value = draw(1, 2, 2, 16)
    inputs = (query, torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), key, value)
    expected = attend_extended(*inputs, 1.0)
    assert not seen
    with Recorder():
        found = attend_extended(*inputs, 1.0)
    assert any("attention" in name for name in seen)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_default_dtype_and_masked_rows() -> None:
    """Another default dtype, and scores that are all minus infinity."""
    query, key, value = draw(1, 2, 1, 16)
    torch.set_default_dtype(torch.float64)
    try:
        found = torch.ops.paraxis.attend_appended(query, torch.tensor([]), torch.tensor([]), key, value, 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [x.dtype for x in found] == [torch.float32] * 3 and torch.allclose(found[0], value)
    masked = torch.full_like(key, -torch.inf)
    empty = torch.tensor([])
    found = torch.ops.paraxis.attend_appended(query.abs(), empty, empty, masked, value, 1.0)
    assert torch.equal(found[0], torch.zeros_like(query))
