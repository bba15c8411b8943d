"""Packed attention: the operator against attention with a mask, and transformers' towers captured with it."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from paraxis.compat import packed_attention as packed
from paraxis.compat.packed_attention import NAMES, PACKED_ATTENTION, capture_packed_attention

OFFSETS = [
    [0, 9],  # one sequence
    [0, 2, 4, 9],  # two of one length, one of another
    [0, 3, 6, 9],
    [0, 0, 4, 4, 9],  # empty ones
]


def tensors(heads: int, groups: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, 9, 8), (1, heads // groups, 9, 8), (1, heads // groups, 9, 6)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def masked(q: Any, k: Any, v: Any, offsets: list[int], scale: float | None, causal: bool) -> torch.Tensor:
    sequence = torch.tensor([sum(at >= end for end in offsets[1:]) for at in range(9)])
    mask = sequence[:, None] == sequence
    mask &= torch.ones(9, 9, dtype=torch.bool).tril() if causal else mask
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize(("groups", "scale", "causal"), [(1, None, False), (2, 0.3, False), (2, None, True)])
def test_it_is_attention_inside_of_each_sequence(
    offsets: list[int], groups: int, scale: float | None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "ROWS", 3)  # the backward pass goes by a few queries
    inputs = tensors(4, groups)
    found = PACKED_ATTENTION(*inputs, torch.tensor(offsets), scale, causal)
    expected = masked(*inputs, offsets, scale, causal)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    for mine, right in zip(*(torch.autograd.grad(x, inputs, grad) for x in (found, expected)), strict=True):
        torch.testing.assert_close(mine, right)


def test_low_precision_gradients_are_summed_in_float32() -> None:
    inputs = [x.detach().bfloat16().requires_grad_() for x in tensors(4, 1)]
    out = PACKED_ATTENTION(*inputs, torch.tensor([0, 4, 9]), None, False)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(x.dtype == torch.bfloat16 and x.isfinite().all() for x in grads)


def test_the_operator_says_what_it_returns() -> None:
    torch.library.opcheck(PACKED_ATTENTION, (*tensors(4, 2), torch.tensor([0, 4, 9]), None, False))


# -- transformers' towers ------------------------------------------------------------------------------------------


class Config:
    _attn_implementation = "sdpa"


class Attention(torch.nn.Module):
    """What transformers' towers do."""

    is_causal = False
    config = Config()

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        if is_flash_attention_requested(self.config):
            found = attend(self, x, x, x, attention_mask=None, dropout=dropout, cu_seq_lens_q=cu_seqlens)
            return found[0]
        parts = torch.split(x, (cu_seqlens[1:] - cu_seqlens[:-1]).tolist(), dim=2)
        return torch.cat([attend(self, y, y, y, attention_mask=None, dropout=dropout)[0] for y in parts], 1)


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not is_flash_attention_requested(Config())
        return ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)(self, x, x, x, attention_mask=None)[0]


class Functions:
    calls = 0

    def get_interface(self, name: str, default: Any) -> Any:
        def attend(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, dropout: float = 0.0) -> Any:
            self.calls += 1
            return scaled_dot_product_attention(q, k, v).transpose(1, 2), None

        return attend


def is_flash_attention_requested(config: Any) -> bool:
    return "flash" in config._attn_implementation


ALL_ATTENTION_FUNCTIONS = Functions()
capturing = False


@pytest.fixture(autouse=True)
def adapted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This file as a modeling file of transformers."""
    import sys

    name = "transformers.models.packed.modeling_packed"
    for cls in (Attention, Plain):
        monkeypatch.setattr(cls, "__module__", name)
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "__name__", name)
    monkeypatch.setitem(sys.modules, name, module)
    capture_packed_attention(lambda: capturing)
    yield
    packed._seen.discard(name)


def test_only_forwards_that_split_at_lengths_are_adapted() -> None:
    assert isinstance(Attention.forward, FunctionType)
    assert set(NAMES.values()) <= set(Attention.forward.__code__.co_names)
    assert set(NAMES) <= set(Plain.forward.__code__.co_names)


@pytest.mark.parametrize("dropout", [0.0, 1e-12])  # with dropout, attention with a mask
def test_they_are_one_operator_where_a_graph_is_captured(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x, offsets, module = torch.randn(1, 2, 9, 8), torch.tensor([0, 4, 9]), Attention()
    expected = module(x, offsets, dropout)
    monkeypatch.setattr(__import__("sys").modules[Attention.__module__], "capturing", True)
    calls = ALL_ATTENTION_FUNCTIONS.calls
    torch.testing.assert_close(module(x, offsets, dropout), expected)
    assert ALL_ATTENTION_FUNCTIONS.calls == calls
    Plain()(x)
    assert ALL_ATTENTION_FUNCTIONS.calls == calls + 1
    config = Config()
    config._attn_implementation = "eager"  # it may have to return weights
    module.config = config
    torch.testing.assert_close(module(x, offsets), expected)
    assert ALL_ATTENTION_FUNCTIONS.calls == calls + 3
