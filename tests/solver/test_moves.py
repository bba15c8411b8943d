"""Moves between placements, and sequence-parallel activations."""

from __future__ import annotations

import torch
from solver.programs import traced

from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Shard
from paraxis.rules import Strategy
from paraxis.rules.validation.draw import f, i
from paraxis.rules.validation.run import call_of
from paraxis.solver.moves import sequence_length, sequence_shards, settled, share

EVEN = Layout.even(8, 2)


def test_placement_after_a_move() -> None:
    other = Shard.of(1, EVEN)
    shard = Shard.of(0, EVEN)
    assert settled(REPLICATE, shard) == REPLICATE
    assert settled(shard, shard) == shard
    assert settled(shard, REPLICATE) == settled(shard, SHARED) == settled(shard, PARTIAL) == REPLICATE
    assert settled(shard, other) == REPLICATE, "gathered on the way"
    assert settled(PARTIAL, shard) == shard
    assert settled(PARTIAL, REPLICATE) == settled(PARTIAL, SHARED) == REPLICATE
    assert settled(SHARED, shard) == settled(SHARED, REPLICATE) == SHARED


def test_replicated_inputs_of_a_sharded_result_are_shared() -> None:
    call, _ = call_of(torch.ops.aten.embedding.default, (f(8, 6), i(8, 4)), {}, 2)
    sharded = Strategy((REPLICATE, REPLICATE), (Shard.of(1, Layout.even(6, 2)),), kind="column")
    assert share(call, sharded).inputs == (SHARED, REPLICATE), "indices have no gradients"
    assert share(call, sharded).kind == "column"
    everything = Strategy((REPLICATE, REPLICATE), (REPLICATE,))
    assert share(call, everything) is everything


def test_sequence_shards() -> None:
    assert sequence_shards((2, 8, 16), 8, 2) == [Shard.of(1, EVEN)]
    assert sequence_shards((16, 16), 8, 2) == [Shard.of(0, EVEN)], "batch and sequence flattened: a part of each"
    assert sequence_shards((2, 8, 1), 8, 2) == [], "the statistics of a norm"
    assert sequence_shards((2, 6, 16), 8, 2) == sequence_shards((2, 8, 16), None, 2) == []
    assert sequence_shards((2, 1, 16), 1, 2) == [], "shorter than the number of ranks"


def test_sequence_length_is_the_most_common() -> None:
    program = traced(lambda x, y, w: (x @ w, (x @ w).relu(), y @ w), [f(2, 8, 6), f(2, 5, 6)], [f(6, 6)], 2)
    assert sequence_length(program) == 8
    assert sequence_length(traced(lambda x, w: x @ w, [f(4, 6)], [f(6, 6)], 2)) is None
