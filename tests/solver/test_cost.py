"""The cost model: moves, compute, memory, gradients."""

from __future__ import annotations

import pytest
import torch

from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Shard
from paraxis.rules import Strategy, Tensor, replicated
from paraxis.rules.validation.draw import f
from paraxis.rules.validation.run import call_of
from paraxis.solver import PRESETS, CostModel
from paraxis.solver.cost import collective_between, nbytes, numel
from paraxis.solver.machine import DEFAULT

SHARD = Shard.of(0, Layout.even(8, 4))


def test_cost_of_moves() -> None:
    model = CostModel(world=4, latency=1.0, bandwidth=100.0)
    shard, other = Shard.of(0, Layout.even(8, 4)), Shard.of(1, Layout.even(8, 4))
    assert model.move(REPLICATE, shard, 400) == model.move(REPLICATE, PARTIAL, 400) == 0
    assert model.move(shard, shard, 400) == model.move(SHARED, REPLICATE, 400) == 0
    assert model.move(shard, REPLICATE, 400) == model.move(shard, other, 400) == 1 + 0.75 * 4
    assert model.move(PARTIAL, REPLICATE, 400) == 1 + 2 * 0.75 * 4
    assert model.move(PARTIAL, shard, 400) == 1 + 0.75 * 4


def test_fraction_is_that_of_the_fullest_rank() -> None:
    model = CostModel(world=2)
    assert model.fraction(REPLICATE) == model.fraction(SHARED) == model.fraction(PARTIAL) == 1
    assert model.fraction(Shard.of(0, Layout.even(5, 2))) == pytest.approx(3 / 5)
    assert model.fraction(Shard.of(0, Layout.even(8, 2))) == 0.5


def test_the_default_machine() -> None:
    assert CostModel.on(DEFAULT, 4) == CostModel(world=4)
    slow, fast = CostModel.on(PRESETS["pcie"], 4), CostModel.on(PRESETS["h100"], 4)
    assert slow.move(PARTIAL, REPLICATE, 1e8) > 10 * fast.move(PARTIAL, REPLICATE, 1e8)


def test_gradients_are_moved_back() -> None:
    """The gradient of a replicated tensor that was used in parts is partial; that of a gathered one is there."""
    model = CostModel(world=4, backward=True)
    reduced, gathered = model.collective("all_reduce", 64), model.collective("all_gather", 64)
    assert model.return_gradient(REPLICATE, SHARED, 64, 1) == reduced
    assert model.return_gradient(REPLICATE, SHARED, 64, 2) == reduced / 2
    assert model.return_gradient(REPLICATE, SHARD, 64, 1) == model.return_gradient(PARTIAL, SHARD, 64, 1) == gathered
    assert model.return_gradient(SHARD, SHARED, 64, 1) == model.collective("reduce_scatter", 64)
    assert model.return_gradient(SHARD, REPLICATE, 64, 1) == model.return_gradient(PARTIAL, REPLICATE, 64, 1) == 0.0
    assert CostModel(world=4).return_gradient(REPLICATE, SHARED, 64, 1) == 0.0


def test_collective_between_placements() -> None:
    assert collective_between(PARTIAL, SHARD) == "reduce_scatter"
    assert collective_between(PARTIAL, REPLICATE) == collective_between(PARTIAL, SHARED) == "all_reduce"
    assert collective_between(SHARD, REPLICATE) == "all_gather"
    assert collective_between(REPLICATE, SHARD) is collective_between(SHARED, REPLICATE) is None


def test_sharded_compute_is_cheaper_and_the_backward_doubles_it() -> None:
    call, _ = call_of(torch.ops.aten.linear.default, (f(16, 64), f(64, 64)), {}, 4)
    rows = Strategy((REPLICATE, Shard.of(0, Layout.even(64, 4))), (Shard.of(1, Layout.even(64, 4)),))
    model = CostModel(world=4, memory=1e30)
    assert model.run(call, rows) == pytest.approx(model.run(call, replicated(call)) / 4)
    assert CostModel(world=4, memory=1e30, backward=True).run(call, rows) == pytest.approx(3 * model.run(call, rows))


def test_the_price_of_replicated_parameters() -> None:
    model, weight, router = CostModel(world=4), Tensor(0, (64, 64), torch.float32), Tensor(0, (8, 64), torch.float32)
    assert numel(weight) == 64 * 64 and nbytes(weight) == 4 * 64 * 64
    assert model.store(weight, REPLICATE, shardable=True) == model.replication * nbytes(weight)
    assert model.store(router, REPLICATE, shardable=True) == model.narrow * nbytes(router)
    assert model.store(weight, REPLICATE, shardable=False) == 0.0
    assert model.store(Tensor(0, (64,), torch.float32), REPLICATE, shardable=True) == 0.0
    assert model.store(weight, SHARD, shardable=True) == nbytes(weight) / 4 / model.memory
    assert model.gather_weight(weight) == model.gathered * model.store(weight, REPLICATE, shardable=True)
    assert model.without_prices().store(weight, REPLICATE, shardable=True) == 0.0
