"""FlexAttention as a function of its tensors: with torch's operator, its kernel, and plain operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as public

from paraxis.compat import flex_attention as compat
from paraxis.compat.flex_attention import FlexAttention


def score(x: Any, batch: Any, head: Any, q: Any, k: Any, slopes: Any) -> Any:
    return x + slopes[head] * (q - k)


def mask(batch: Any, head: Any, q: Any, k: Any, lengths: Any) -> Any:
    return (q >= k) & (k < lengths[batch])


def call(heads: int = 4, length: int = 40) -> tuple[FlexAttention, list[Any], torch.Tensor]:
    """(function, what to call it with, the result that torch's public function gives)"""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, length, 16) for n in (heads, heads // 2, heads // 2))
    slopes, lengths = torch.randn(heads), torch.tensor([17, length])
    blocks = public.create_block_mask(
        lambda b, h, q, k: mask(b, h, q, k, lengths), 2, None, length, length, device="cpu"
    )
    block_mask = (*blocks.as_tuple()[:-1], torch.fx.symbolic_trace(mask))
    options = public._apply_kernel_options(q, k, v, False, None)
    args = (q, k, v, torch.fx.symbolic_trace(score), block_mask, 0.3, options, (slopes,), (lengths,))
    expected = public.flex_attention(
        q, k, v, lambda x, b, h, i, j: score(x, b, h, i, j, slopes), block_mask=blocks, scale=0.3, enable_gqa=True
    )
    return *FlexAttention.of(args, {}), expected


def test_every_name_exists() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__)


def test_the_result_is_that_of_torch() -> None:
    function, leaves, expected = call()
    assert torch.allclose(function(*leaves)[0], expected, atol=1e-6)
    assert torch.allclose(function.captured(*leaves)[0], expected, atol=1e-6)


@pytest.mark.long
def test_the_compiled_kernel_gives_the_same() -> None:
    """What runs on a GPU. torch has the kernel for CPUs too, without gradients."""
    function, leaves, expected = call()
    with torch.no_grad():
        assert torch.allclose(compat._compiled()(function, *leaves)[0], expected, atol=1e-5)


def test_functions_see_the_heads_of_the_full_tensor() -> None:
    function, leaves, expected = call()
    assert function.reads_head
    halves = []
    for first in (0, 2):
        q, k, v = (t[:, first // n : (first + 2) // n] for t, n in zip(leaves[:3], (1, 2, 2), strict=True))
        halves.append(function.from_head(first)(q, k, v, *leaves[3:])[0])
    assert torch.allclose(torch.cat(halves, 1), expected, atol=1e-6)


def test_gradients_on_a_cpu() -> None:
    function, leaves, _ = call()
    leaves[0].requires_grad_()
    function(*leaves)[0].sum().backward()
    assert leaves[0].grad is not None and bool(leaves[0].grad.any())


def test_equal_graphs_are_one() -> None:
    """The layers of a model have equal ones: a compiler sees one function."""
    (first, _, _), (second, _, _) = call(), call()
    assert first.score_mod is second.score_mod and first.mask_mod is second.mask_mod


def test_torch_refuses_gradients_on_a_cpu_except_where_asked() -> None:
    before, allowed = public._validate_device, [False]
    public._validate_device = getattr(before, "_checked", before)  # another test may have captured a model
    try:
        compat.differentiate_on_cpu(lambda: allowed[0])
        query = torch.ones(1, requires_grad=True)
        with pytest.raises(NotImplementedError):
            public._validate_device(query, query, query)
        allowed[0] = True
        public._validate_device(query, query, query)
    finally:
        public._validate_device = before
