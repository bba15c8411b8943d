"""Patterns that several rewrites share: rotary embeddings, repeated heads, attention, ranges, predicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import trace
from torch.fx import Node

from paraxis.graph.match import match
from paraxis.optimize import patterns

ROWS, FEATURES = 3, 8


def result(function: Callable[..., Any], *inputs: torch.Tensor) -> Node:
    """The node that a function returns."""
    return trace(function, list(inputs)).graph.output_node().all_input_nodes[0]


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([-x[..., FEATURES // 2 :], x[..., : FEATURES // 2]], -1)


STATES = torch.randn(2, 4, ROWS, FEATURES)
ANGLES = torch.rand(1, 1, ROWS, FEATURES)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, cos, sin: x * cos + rotate_half(x) * sin,
        lambda x, cos, sin: sin * rotate_half(x) + cos * x,
    ],
)
def test_rotary_embedding_is_found_in_any_order(function: Callable[..., Any]) -> None:
    found = patterns.rotary_of(result(function, STATES, ANGLES, ANGLES + 1), ROWS, FEATURES)
    assert found is not None and [found.x.name, found.cos.name, found.sin.name] == ["arg0_1", "arg1_1", "arg2_1"]
    assert found.has_angles_of(found)


@pytest.mark.parametrize(
    ("function", "angles"),
    [
        (lambda x, cos, sin: x * cos - rotate_half(x) * sin, ANGLES),
        (lambda x, cos, sin: (x + 1) * cos + rotate_half(x) * sin, ANGLES),
        (lambda x, cos, sin: x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin, ANGLES),
        (lambda x, cos, sin: x * cos + rotate_half(x) * sin, torch.rand(1, 4, ROWS, FEATURES)),
    ],
    ids=["difference", "two inputs", "other halves", "angles per head"],
)
def test_other_rotations_are_not_rotary_embeddings(function: Callable[..., Any], angles: torch.Tensor) -> None:
    assert patterns.rotary_of(result(function, STATES, angles, angles + 1), ROWS, FEATURES) is None


def test_repeated_heads_are_found_with_their_count() -> None:
    node = result(lambda x: x[:, :, None].expand(2, 4, 3, ROWS, FEATURES).reshape(2, 12, ROWS, FEATURES), STATES)
    found = patterns.repeated_heads_of(node)
    assert found is not None and found.repeats == 3 and found.source.op == "placeholder"
    assert patterns.without_repeated_heads(node) is found.source
    other = result(lambda x: x.reshape(2, 12, FEATURES), STATES)
    assert patterns.repeated_heads_of(other) is None and patterns.without_repeated_heads(other) is other


def test_attention_has_its_arguments_by_position_and_by_name() -> None:
    causal = result(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.5), STATES)
    found = patterns.attention_of(causal)
    assert found is not None and found.is_causal and found.scale == 0.5 and found.mask is None
    assert patterns.count_queries(causal) == ROWS
    dropout = result(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), STATES)
    assert patterns.attention_of(dropout) is None


def test_ranges_start_at_zero() -> None:
    pattern = patterns.range_of(4)
    assert match(pattern, result(lambda x: torch.arange(4), STATES)) is not None
    assert match(pattern, result(lambda x: torch.arange(0, 4), STATES)) is not None
    assert match(pattern, result(lambda x: torch.arange(1, 4), STATES)) is None
    assert match(pattern, result(lambda x: torch.arange(5), STATES)) is None


def test_casts_and_added_dimensions_are_looked_through() -> None:
    cast = result(lambda x: x.to(torch.float64).to(torch.float32), STATES)
    assert patterns.without_casts(cast).op == "placeholder"
    added = result(lambda x: x.unsqueeze(1), torch.rand(2, ROWS, FEATURES))
    assert patterns.without_added_dims(added).op == "placeholder"
    repeated = result(lambda x: x.unsqueeze(1).expand(2, 5, ROWS, FEATURES), torch.rand(2, ROWS, FEATURES))
    assert patterns.without_added_dims(repeated) is repeated


def test_what_kernels_take() -> None:
    assert [n for n in (8, 16, 24, 64, 256, 512) if patterns.is_kernel_head_size(n)] == [16, 64, 256]
    assert patterns.is_position(result(lambda x: x + 1, torch.tensor([3])))
    assert not patterns.is_position(result(lambda x: x + 1, torch.tensor([3, 4])))
    assert not patterns.is_position(result(lambda x: x + 1, torch.tensor([3.0])))
