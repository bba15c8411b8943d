"""Operators on sharded results by the planner's rules: a KV cache stays sharded under beam search and cropping."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from helpers.shards import sharded_parameter
from tensor.sharded import PLACEMENTS, assert_same, random_tensor, sharded

from paraxis.placement import Layout, Shard
from paraxis.tensor.rule_dispatch import dispatch_by_rule

HEADS = Shard.of(1, Layout.even(4, 2))
CACHE = (2, 4, 5, 3)


def cache_operators() -> None:
    x = random_tensor(0, CACHE)
    cache, beams = sharded(x, HEADS), torch.tensor([1, 0])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # nothing is gathered
        assert_same("beams", cache.index_select(0, beams), x.index_select(0, beams), HEADS)
        assert_same("crop", cache[:, :, :3], x[:, :, :3], HEADS)
        assert_same("repeat", cache.repeat_interleave(2, 0), x.repeat_interleave(2, 0), HEADS)
        assert_same("cat", torch.cat([cache, cache], 2), torch.cat([x, x], 2), HEADS)


def test_caches_stay_sharded(ranks: Any) -> None:
    ranks(2).run(cache_operators)


def excluded() -> None:
    """Along the sharded dimension, on parameters, with gradients, and in place."""
    x, op = random_tensor(), torch.ops.aten.index_select.default
    t, index = sharded(x, PLACEMENTS["rows"]), torch.tensor([0, 1])
    assert dispatch_by_rule(op, (t, 0, index), {}) is NotImplemented
    assert dispatch_by_rule(op, (sharded_parameter(x, PLACEMENTS["rows"]), 1, index), {}) is NotImplemented
    assert dispatch_by_rule(torch.ops.aten.add_.Tensor, (t, 1), {}) is NotImplemented
    assert dispatch_by_rule(op, (t, 1, index), {}) is not NotImplemented


def test_other_operators_are_not_dispatched_by_rule(ranks: Any) -> None:
    ranks(2).run(excluded)
