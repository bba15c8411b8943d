"""Lookups: embedding tables, index, gather, scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules.families import assert_offers, strategies, validate

from paraxis.placement import PARTIAL, REPLICATE
from paraxis.rules.validation.check import input_placements
from paraxis.rules.validation.draw import f, i
from paraxis.rules.validation.run import call_of, indices, same, shard_of

aten = torch.ops.aten

REPLICATED = {"aten.index.Tensor (4, 6, 8)"}  # with a mask


def test_every_strategy_for_the_samples_is_right() -> None:
    validate("lookup", REPLICATED)


@pytest.mark.parametrize(
    ("op", "args", "inputs", "outputs"),
    [
        (aten.index.Tensor, (f(4, 6, 8), [None, i(6, 3)]), ("S(2)", "R"), ("S(2)",)),
        (aten.gather.default, (f(4, 6), 1, i(6, 4, 2)), ("S(0)", "S(0)"), ("S(0)",)),
        (aten.embedding.default, (f(12, 8), i(12, 4)), ("S(1)", "R"), ("S(1)",)),
    ],
)
def test_rule_offers_these_placements(op: Any, args: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    assert_offers(op, args, inputs, outputs)


@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_parallel_embedding(world: int) -> None:
    """Each rank looks up the ids of its rows and gives zeros for the others: the sum is the embedding."""
    table, ids = f(13, 6), i(13, 4, 5)
    call, _ = call_of(aten.embedding.default, (table, ids), {}, world)
    found = [
        s
        for placements in input_placements(call, world, free=True)
        for s in strategies(aten.embedding.default, (table, ids), placements, world)
        if s.kind == "vocab"
    ]
    assert found
    for strategy in found:
        assert strategy.inputs[1] == REPLICATE and strategy.outputs == (PARTIAL,)
        layout = strategy.inputs[0].dims[0]  # type: ignore[union-attr]
        total = torch.zeros(4, 5, 6, dtype=torch.float64)
        for rank in range(world):
            rows = indices(layout, 13, rank)
            assert rows == list(range(rows[0], rows[-1] + 1)), "the ids of a rank must be one range"
            mine = (ids >= rows[0]) & (ids <= rows[-1])
            local = aten.embedding.default(shard_of(table, strategy.inputs[0], rank), (ids - rows[0]) * mine)
            total += local * mine[..., None]
        assert same(total, aten.embedding.default(table, ids))
