"""Views: reshapes, permutations, expansions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules.families import assert_offers, strategies, validate
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from paraxis.placement import Layout, Shard
from paraxis.rules import Call, Tensor
from paraxis.rules.validation.draw import f
from paraxis.rules.view import carry, expand, groups, squeeze

aten = torch.ops.aten


def test_every_strategy_for_the_samples_is_right() -> None:
    validate("view")


@pytest.mark.parametrize(
    ("op", "args", "inputs", "outputs"),
    [
        (aten.view.default, (f(2, 24), [2, 4, 6]), ("S(1)",), ("S(1)",)),
        (aten.view.default, (f(2, 4, 6), [2, 24]), ("S(1)",), ("S(1)",)),
        (aten.view.default, (f(2, 8), [16]), ("P",), ("P",)),
        (aten.transpose.int, (f(2, 4, 6), 1, 2), ("S(1)",), ("S(2)",)),
    ],
)
def test_rule_offers_these_placements(op: Any, args: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    assert_offers(op, args, inputs, outputs)


def test_groups_match_the_dimensions_of_a_reshape() -> None:
    assert groups((2, 4, 24), (8, 4, 6)) == [([0, 1], [0]), ([2], [1, 2])]
    assert groups((2, 3), (2, 3)) == [([0], [0]), ([1], [1])]


def test_a_head_is_never_split_by_a_view() -> None:
    heads = Shard.of(1, Layout.even(24, 2, unit=6))
    assert carry(heads, (2, 24), (2, 4, 6)) == Shard.of(1, Layout.even(4, 2))
    through = Shard.of(1, Layout.of(24, [[(0, 9)], [(9, 24)]]))
    assert carry(through, (2, 24), (2, 4, 6)) is None


def test_repeated_key_value_heads_follow_the_queries() -> None:
    """``k[:, :, None].expand(...)`` on ranks that share a KV head gives each rank its own query heads."""
    k = Shard.of(1, Layout.even(2, 4))
    expanded = strategies(aten.expand.default, (f(1, 2, 1, 3, 4), [1, 2, 4, 3, 4]), [k], world=4)
    mine = Shard.of({1: Layout.even(2, 4), 2: Layout.of(4, [[(0, 2)], [(2, 4)], [(0, 2)], [(2, 4)]])})
    assert mine in [s.outputs[0] for s in expanded]
    (flat,) = strategies(aten.reshape.default, (f(1, 2, 4, 3, 4), [1, 8, 3, 4]), [mine], world=4)
    assert flat.outputs == (Shard.of(1, Layout.even(8, 4)),)


def test_sizes_that_the_data_decides_are_not_compared() -> None:
    """How many images are not padding, say: comparing such a size with one cannot be answered before it runs."""
    count = ShapeEnv().create_unbacked_symint()
    source, out = Tensor(0, (count, 1, 4), torch.float32), Tensor(0, (count, 6, 4), torch.float32)
    placement = Shard.of(2, Layout.even(4, 2))
    grown = Call(aten.expand.default, (source, [count, 6, 4]), {}, (source,), (out,), world=2)
    assert placement in [s.outputs[0] for s in expand(grown, [placement])]
    squeezed = Tensor(0, (count, 4), torch.float32)
    less = Call(aten.squeeze.dims, (source, [0, 1]), {}, (source,), (squeezed,), world=2)
    assert [s.outputs[0] for s in squeeze(less, [placement])] == [Shard.of(1, Layout.even(4, 2))]
