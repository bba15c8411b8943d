"""Calls and strategies, and the questions that rules ask about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules.operators import gate

from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Shard
from paraxis.rules import UNPLACED, Call, Strategy, Tensor, replicated, sample
from paraxis.rules.base import draws, is_one, is_partial, is_shard, layouts_on, normalize_dim, same_size
from paraxis.rules.validation.draw import f
from paraxis.rules.validation.run import call_of

aten = torch.ops.aten
HALVES = Layout.even(8, 2)


def call_to(op: Any, *args: Any, **kwargs: Any) -> Call:
    return call_of(op, args, kwargs, 2)[0]


def test_a_call_knows_its_arguments_and_its_operator() -> None:
    call = call_to(aten.softmax.int, f(4, 6), -1)
    assert call.arg(1, "dim") == -1 and call.arg(2, "dtype", "none") == "none"
    assert call.op_name == "softmax" and call.out == Tensor(0, (4, 6), torch.float64) and call.out.ndim == 2
    assert call_to(gate, f(4, 6), f(4, 6)).op_name == "paraxis_tests::gate"
    assert Call(len, (), {}, (), ()).op_name == ""
    assert sample(gate, 1, b=2) == (gate, (1,), {"b": 2})


def test_the_replicated_strategy() -> None:
    strategy = replicated(call_to(aten.topk.default, f(4, 6), 2))
    assert strategy.inputs == (REPLICATE,) and strategy.outputs == (REPLICATE, REPLICATE) and not strategy.is_sharded
    assert Strategy((REPLICATE,), (PARTIAL,)).is_sharded and Strategy((REPLICATE,), (SHARED,)).is_sharded


def test_kinds_of_placements() -> None:
    assert is_shard(SHARED) and not is_shard(REPLICATE) and not is_shard(UNPLACED)
    assert is_partial(PARTIAL) and not is_partial(UNPLACED)


def test_layouts_on_a_dimension() -> None:
    call, both = call_to(aten.relu.default, f(8, 8)), Shard.of({0: HALVES, 1: HALVES})
    assert layouts_on(call, [Shard.of(1, HALVES)], 0, 1) == [HALVES]
    assert layouts_on(call, [Shard.of(1, HALVES)], 0, 0) == layouts_on(call, [both], 0, 0) == []
    assert layouts_on(call, [UNPLACED], 0, 0) == []
    call.layouts[0, 0] = (HALVES, Layout.even(4, 2))
    assert layouts_on(call, [UNPLACED], 0, 0) == [HALVES, Layout.even(4, 2)]


@pytest.mark.parametrize(
    ("call", "random"),
    [
        (call_to(aten.rand_like.default, f(4)), True),
        (call_to(aten.dropout.default, f(4), 0.5, True), True),
        (call_to(aten.dropout.default, f(4), 0.5, False), False),
        (call_to(aten.native_dropout.default, f(4), 0.5, None), True),
        (call_to(aten.scaled_dot_product_attention.default, f(1, 2, 3, 4), f(1, 2, 3, 4), f(1, 2, 3, 4)), False),
        (call_to(aten.relu.default, f(4)), False),
    ],
)
def test_random_calls_are_recognised(call: Call, random: bool) -> None:
    assert draws(call) == random


def test_sizes_and_dimensions() -> None:
    assert normalize_dim(-1, 3) == 2 and normalize_dim(1, 3) == 1
    assert is_one(1) and not is_one(2) and not is_one(object())
    symbol = object()
    assert same_size(4, 4) and not same_size(4, 5) and same_size(symbol, symbol) and not same_size(symbol, 4)
