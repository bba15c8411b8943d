"""Patterns that several rewrites share: rotary embeddings, repeated heads, attention, ranges, predicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import call_of, pretend, set_arg, trace
from torch.fx import Graph, GraphModule, Node

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


# -- every condition of a rotary embedding ---------------------------------------------------------------------------

aten = torch.ops.aten


def rotary() -> GraphModule:
    """A rotary embedding; its inputs have the batch, and so have its angles."""
    angles = torch.rand(2, 1, ROWS, FEATURES)
    return trace(lambda x, cos, sin: x * cos + rotate_half(x) * sin, [STATES, angles, angles + 1])


def rotary_in(module: GraphModule) -> patterns.Rotary | None:
    return patterns.rotary_of(module.graph.output_node().all_input_nodes[0], ROWS, FEATURES)


def test_graph_of_the_conditions_below_matches() -> None:
    assert rotary_in(rotary()) is not None


def low_half(module: GraphModule) -> Node:
    """``x[..., :half]``"""
    return call_of(module, aten.cat.default).args[0][1]  # type: ignore[index,return-value]


def high_half(module: GraphModule) -> Node:
    """``x[..., half:]``, which is negated."""
    return call_of(module, aten.neg.default).all_input_nodes[0]


def angles(module: GraphModule) -> Node:
    return module.graph.find_nodes(op="placeholder")[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: set_arg(low_half(m), 1, 2),
        lambda m: set_arg(high_half(m), 1, 2),
        lambda m: set_arg(low_half(m), 2, 1),
        lambda m: set_arg(low_half(m), 3, FEATURES // 2 + 1),
        lambda m: set_arg(high_half(m), 2, FEATURES // 2 + 1),
        lambda m: set_arg(high_half(m), 3, FEATURES - 1),
        lambda m: setattr(high_half(m), "args", (*high_half(m).args[:3], FEATURES, 2)),
        lambda m: set_arg(call_of(m, aten.cat.default), 1, 2),
        lambda m: setattr(call_of(m, aten.cat.default), "args", (call_of(m, aten.cat.default).args[0],)),
        lambda m: pretend(angles(m), dtype=torch.float64),
        lambda m: pretend(angles(m), (1, ROWS, FEATURES)),
        lambda m: pretend(angles(m), (2, 1, ROWS + 1, FEATURES)),
        lambda m: pretend(angles(m), (3, 1, ROWS, FEATURES)),
        lambda m: angles(m).meta.clear(),
        lambda m: m.graph.find_nodes(op="placeholder")[0].meta.clear(),
    ],
    ids=[
        "low half of another dim",
        "high half of another dim",
        "low half starts later",
        "low half ends later",
        "high half starts later",
        "high half ends early",
        "step of the high half",
        "halves joined along another dim",
        "halves joined along the first dim",
        "dtype of the angles",
        "angles of three dims",
        "angles of more rows",
        "angles of another batch",
        "angles that are no tensor",
        "input that is no tensor",
    ],
)
def test_what_differs_in_one_respect_is_no_rotary_embedding(change: Callable[[GraphModule], Any]) -> None:
    module = rotary()
    change(module)
    assert rotary_in(module) is None


def test_angles_are_the_same_if_both_factors_are() -> None:
    x, cos, sin = trace(lambda *inputs: inputs, [STATES] * 3).graph.find_nodes(op="placeholder")
    both = patterns.Rotary(x, cos, sin)
    assert both.has_angles_of(patterns.Rotary(sin, cos, sin))
    assert not both.has_angles_of(patterns.Rotary(x, cos, x)) and not both.has_angles_of(patterns.Rotary(x, x, sin))


# -- and of repeated heads, added dimensions, ranges and queries ------------------------------------------------------


def test_other_expansions_repeat_no_heads() -> None:
    def tile(x: torch.Tensor) -> torch.Tensor:
        """All heads three times, and not each of them: three heads give nine in both cases."""
        return x[:, None].expand(2, 3, 3, ROWS, FEATURES).reshape(2, 9, ROWS, FEATURES)

    assert patterns.repeated_heads_of(result(tile, STATES[:, :3])) is None
    module = trace(lambda x: x[:, :, None].expand(2, 4, 3, ROWS, FEATURES).reshape(2, 12, ROWS, FEATURES), [STATES])
    node = call_of(module, aten.reshape.default)
    assert patterns.repeated_heads_of(node) is not None
    pretend(node, (2, 6, 2 * ROWS, FEATURES))
    assert patterns.repeated_heads_of(node) is None, "heads are joined with something else"
    (x,) = module.graph.find_nodes(op="placeholder")
    set_arg(call_of(module, aten.expand.default), 1, [2, 4, x, ROWS, FEATURES])
    assert patterns.repeated_heads_of(node) is None, "the count is dynamic"


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.unsqueeze(0), (FEATURES,)),
        (lambda x: x.unsqueeze(0), (ROWS, FEATURES)),
        (lambda x: x.unsqueeze(-1), (ROWS, FEATURES)),
    ],
    ids=["vector", "before the batch", "after the features"],
)
def test_dimensions_before_the_batch_and_after_the_features_stay(function: Callable[..., Any], shape: Any) -> None:
    node = result(function, torch.rand(shape))
    assert patterns.without_added_dims(node) is node


def test_range_with_steps_is_another_pattern() -> None:
    assert match(patterns.range_of(4), result(lambda x: torch.arange(0, 4, 2), STATES)) is None


def test_queries_are_counted_of_four_dimensions_and_static_sizes() -> None:
    module = trace(lambda x: F.scaled_dot_product_attention(x, x, x), [STATES], tracing_mode="symbolic")
    node = call_of(module, aten.scaled_dot_product_attention.default)
    assert patterns.count_queries(node) is None
    pretend(node, (2, ROWS, FEATURES))
    assert patterns.count_queries(node) is None
    node.meta.clear()
    assert patterns.count_queries(node) is None


def test_slices_of_everything() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for arguments, found in (
        ((1,), True),
        ((1, 0), True),
        ((1, None, None), True),
        ((1, 0, 9223372036854775807), True),
        ((1, 1), False),
        ((1, 0, 4), False),
        ((1, 0, 9223372036854775807, 2), False),
    ):
        assert patterns.is_slice_of_all(graph.call_function(torch.ops.aten.slice.Tensor, (x, *arguments))) == found
    assert not patterns.is_slice_of_all(x) and not patterns.is_slice_of_all(
        graph.call_function(torch.ops.aten.alias.default, (x,))
    )
