"""Strategies on simulated ranks: sharding, unsharding, comparing."""

from __future__ import annotations

import pytest
import torch
from rules.families import HALVES

from paraxis.placement import PARTIAL, REPLICATE, Layout, Shard
from paraxis.rules import Strategy
from paraxis.rules.validation.draw import b, f, i
from paraxis.rules.validation.run import Trial, indices, indices_of, same, shard_of, terms, unshard

aten = torch.ops.aten
ROWS = Shard.of(0, Layout.even(4, 2))


def test_unshard_inverts_shard() -> None:
    full, packed = f(4, 8), Shard.of({0: Layout.even(4, 2), 1: Layout.even(4, 2)})
    halves = [shard_of(full, Shard.of(1, HALVES), rank) for rank in range(2)]
    assert same(unshard(halves, Shard.of(1, HALVES), full), full)  # type: ignore[arg-type]
    assert torch.equal(shard_of(full, packed, 1), full[indices_of(full.shape, packed, 1)])
    assert indices(Layout.even(4, 2), 8, 1) == [2, 3, 6, 7]
    assert same(unshard([full, full], REPLICATE, full), full)  # type: ignore[arg-type]
    assert same(unshard(terms(full, 3), PARTIAL, full), full)  # type: ignore[arg-type]


def test_unshard_reports_what_is_missing_or_differs() -> None:
    full, half = f(4, 8), Shard.of(1, HALVES)
    parts = [shard_of(full, half, rank) for rank in range(2)]
    assert "its placement says" in unshard([parts[0], parts[1][:, :2]], half, full)  # type: ignore[operator]
    assert "disagrees" in unshard([full, full + 1], REPLICATE, full)  # type: ignore[operator]
    hole = Shard.of(1, Layout(8, (((0, 4),), ((5, 8),))))
    assert "on no rank" in unshard([shard_of(full, hole, r) for r in range(2)], hole, full)  # type: ignore[operator]


@pytest.mark.parametrize("tensor", [f(4, 6), f(4, 6).float(), i(9, 4, 6), b(4, 6), torch.view_as_complex(f(4, 6, 2))])
def test_terms_sum_to_the_tensor(tensor: torch.Tensor) -> None:
    parts = terms(tensor, 3)
    total = parts[0] | parts[1] | parts[2] if tensor.dtype == torch.bool else parts[0] + parts[1] + parts[2]
    assert same(total, tensor)


def test_same_compares_dtype_shape_and_values() -> None:
    x = f(4)
    assert same(x, x + 1e-12) and not same(x, x + 1e-6) and same(x, x + 1e-6, loose=True)
    assert not same(x, x.float()) and not same(x, x[:3]) and not same(i(2, 3), i(2, 3) + 5)


def test_problems_of_a_strategy() -> None:
    trial = Trial.of(aten.relu.default, (f(4, 8),), {}, 2)
    assert trial.problem(Strategy((ROWS,), (ROWS,))) is None
    assert trial.problem(Strategy((ROWS,), (REPLICATE,))) is not None
    assert "2 placements for 1 tensors" in str(trial.problem(Strategy((ROWS, ROWS), (ROWS,))))
    assert "does not have" in str(trial.problem(Strategy((Shard.of(2, HALVES),), (ROWS,))))
    assert trial.problem(Strategy((Shard.of(0, Layout.even(3, 2)),), (ROWS,))) is None, "the solver uses no such layout"
    assert not trial.fits(Strategy((Shard.of(0, Layout.even(3, 2)),), (ROWS,)))


def test_a_replicated_result_beside_a_sharded_one_is_a_problem() -> None:
    trial = Trial.of(aten.native_dropout.default, (f(4, 8), 0.5, False), {}, 2)
    assert trial.problem(Strategy((ROWS,), (ROWS, ROWS)), values=False) is None
    both = Trial.of(aten.var_mean.correction, (f(4, 8), [1]), {}, 2)
    assert "replicated beside a sharded one" in str(both.problem(Strategy((REPLICATE,), (ROWS, REPLICATE))))
