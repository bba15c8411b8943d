"""Masks that hide the keys after the position of a decode step are recognized, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.graphs import trace
from optimize.decode_kernels.reference import needs_kernels, rewrite_on_cpu

from paraxis.optimize.decode_kernels.causal_mask import hides_later_keys

pytestmark = needs_kernels
LENGTH, BATCH = 12, 2


def draw() -> list[torch.Tensor]:
    """Query, key, value, both caches, the position, and a padding mask."""
    torch.manual_seed(0)
    states = [torch.randn(BATCH, 2, 1, 16) for _ in range(3)]
    caches = [torch.randn(BATCH, 2, LENGTH, 16) for _ in range(2)]
    return [*states, *caches, torch.tensor(5), torch.rand(BATCH, LENGTH) > 0.3]


def position_of(length: Any) -> torch.Tensor:
    return torch.arange(1) + length


def as_transformers_writes_it(length: Any, padding: Any) -> torch.Tensor:
    queries = (position_of(length) + 0)[None, None, :, None]
    keys = (torch.arange(LENGTH) + 0)[None, None, None, :]
    return (keys <= queries).expand(BATCH, -1, 1, LENGTH)


def the_other_way_round(length: Any, padding: Any) -> torch.Tensor:
    return position_of(length).view(1, 1, 1, 1) >= torch.arange(0, LENGTH).view(1, 1, 1, LENGTH)


def without_the_newest(length: Any, padding: Any) -> torch.Tensor:
    return (torch.arange(LENGTH) < length)[None, None, None]


def one_more(length: Any, padding: Any) -> torch.Tensor:
    return (torch.arange(LENGTH) <= length + 1)[None, None, None]


def padded(length: Any, padding: Any) -> torch.Tensor:
    return as_transformers_writes_it(length, padding) & padding[:, None, None]


def later_range(length: Any, padding: Any) -> torch.Tensor:
    return (torch.arange(1, LENGTH + 1) <= length)[None, None, None]


def moved(length: Any, padding: Any) -> torch.Tensor:
    """A range over the queries, in the place of the keys."""
    return (torch.arange(LENGTH)[:, None] <= length).view(1, 1, 1, LENGTH)


def padded_or_all(length: Any, padding: Any) -> torch.Tensor:
    return as_transformers_writes_it(length, padding) | padding[:, None, None]


MASKS = {
    as_transformers_writes_it: (True, True),
    the_other_way_round: (True, True),
    padded: (True, False),
    without_the_newest: (False, False),
    one_more: (False, False),
    padded_or_all: (False, False),
    later_range: (False, False),
    moved: (False, False),
}
"""For each, whether it hides all later keys, and whether it hides no other."""


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_mask_is_dropped_only_if_it_says_just_that(mask: Any) -> None:
    """With and without, the kernels compute what the operators do."""

    def step(q: Any, k: Any, v: Any, keys: Any, values: Any, length: Any, padding: Any) -> torch.Tensor:
        position = position_of(length)
        keys, values = keys.index_copy_(2, position, k), values.index_copy_(2, position, v)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask(length, padding))

    module, kernels = rewrite_on_cpu(step, draw())
    assert kernels == ["decode_attention"]
    (kernel,) = (node for node in module.graph.nodes if "decode_attention" in node.name)
    assert (kernel.args[4] is not None, kernel.args[3] is None) == MASKS[mask]


def test_another_position_than_that_of_the_write() -> None:
    def masks(length: Any, other: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return position_of(length) * 1, torch.arange(LENGTH) <= other

    module = trace(masks, [torch.tensor(5), torch.tensor(5)])
    (position, mask) = module.graph.output_node().args[0]
    assert not hides_later_keys(mask, position, LENGTH)
