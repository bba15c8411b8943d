"""Masks that hide nothing, or later keys alone, are dropped for all numbers of tokens; other masks stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, targets, trace

from paraxis.optimize.eager_masks import drop_plain_masks

aten = torch.ops.aten
Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def draw(length: int, heads: int = 2) -> torch.Tensor:
    """Random states of this length."""
    return torch.randn(1, heads, length, 8, generator=torch.Generator().manual_seed(length))


def keys_of(k: torch.Tensor) -> torch.Tensor:
    return torch.arange(k.shape[2])[None, None, None, :]


def queries_of(q: torch.Tensor, past: int = 0) -> torch.Tensor:
    return (torch.arange(q.shape[2]) + past)[None, None].unsqueeze(-1)


def causal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    everything = torch.full((), True)
    return (everything & (keys_of(k) <= queries_of(q)).to(torch.bool)).expand(1, -1, q.shape[2], k.shape[2])


def after_others(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The last positions see all keys up to their own."""
    return keys_of(k) <= queries_of(q, k.shape[2] - q.shape[2])


MASKS: dict[str, Mask] = {
    "causal": causal,
    "causal, the other way": lambda q, k: queries_of(q) >= keys_of(k) + 0,
    "strictly": lambda q, k: keys_of(k) < queries_of(q, 1),
    "wide window": lambda q, k: causal(q, k) & (keys_of(k) > queries_of(q) - 100),
    "narrow window": lambda q, k: causal(q, k) & (keys_of(k) > queries_of(q) - 3),
    "after others": after_others,
    "shifted": lambda q, k: keys_of(k) <= queries_of(q, 1),
    "without the own": lambda q, k: (keys_of(k) < queries_of(q)) | (keys_of(k) == 0),
    "later ones": lambda q, k: keys_of(k) >= queries_of(q),
    "of even keys": lambda q, k: causal(q, k) & (keys_of(k) % 2 == 0),
    "everything": lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool),
    "transposed": lambda q, k: causal(q, k).transpose(2, 3),
}
"""Masks of booleans."""
CAUSAL = {"causal", "causal, the other way", "strictly", "wide window"}


def attention(mask: Mask) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q, k), scale=0.3)


def assert_dropped(module: Any, is_causal: bool | None) -> None:
    """Whether no mask is left, and how attention is then; None if the mask is there."""
    (node,) = module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    if is_causal is None:
        assert isinstance(node.args[3], torch.fx.Node)
        return
    assert node.args[3:] == (None, 0.0, is_causal) and node.kwargs == {"scale": 0.3}
    assert not {aten.arange.default, aten.arange.start, aten.le.Tensor, aten.expand.default} & set(targets(module))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_masks_of_a_prefill_are_dropped_where_they_are_plain(name: str, mode: str) -> None:
    function, inputs = attention(MASKS[name]), [draw(6), draw(6), draw(6)]
    module = trace(function, inputs, tracing_mode=mode)
    expected = True if name in CAUSAL else False if name in ("everything", "after others") else None
    if name == "after others":
        expected = True  # which there are none of
    if name == "wide window" and mode == "symbolic":
        expected = None  # only short prompts are within it
    assert drop_plain_masks(module) == (expected is not None)
    assert_dropped(module, expected)
    assert_same_results(module, function, inputs)
    if mode == "symbolic":
        assert_same_results(module, function, [draw(9), draw(9), draw(9)])


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("queries", [1, 3])
def test_one_query_sees_all_keys_before_it(queries: int, mode: str) -> None:
    """One query after others sees all keys. Of several, the first ones do not see all."""
    inputs = [draw(queries), draw(7), draw(7)]
    module = trace(attention(after_others), inputs, tracing_mode=mode)
    assert drop_plain_masks(module) == (queries == 1)
    assert_dropped(module, False if queries == 1 else None)
    assert_same_results(module, attention(after_others), inputs)
    if mode == "symbolic":
        assert_same_results(module, attention(after_others), [draw(queries), draw(9), draw(9)])


def test_causal_among_more_keys_stays() -> None:
    """Which ``is_causal`` would say as well, but not every kernel."""
    inputs = [draw(4), draw(7), draw(7)]
    module = trace(attention(causal), inputs)
    assert drop_plain_masks(module) == 0
    assert_same_results(module, attention(causal), inputs)


@pytest.mark.parametrize(
    "mask",
    [
        lambda q, k: torch.zeros(q.shape[2], k.shape[2]),
        lambda q, k: keys_of(k).to(torch.int8) <= queries_of(q),
        lambda q, k: torch.arange(0, 2 * k.shape[2], 2)[None, None, None] <= queries_of(q),
        lambda q, k: keys_of(k).float() <= queries_of(q),
        lambda q, k: (keys_of(k) <= queries_of(q)).view(1, 1, q.shape[2] // 2, -1)[..., :6].repeat(1, 1, 2, 1),
    ],
)
def test_masks_of_other_numbers_stay(mask: Mask) -> None:
    inputs = [draw(6), draw(6), draw(6)]
    module = trace(attention(mask), inputs)
    assert drop_plain_masks(module) == 0
    assert_same_results(module, attention(mask), inputs)


def test_mask_that_is_an_input_stays() -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    assert drop_plain_masks(trace(F.scaled_dot_product_attention, [draw(5), draw(5), draw(5), mask])) == 0
