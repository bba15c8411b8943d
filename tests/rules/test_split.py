"""Split, slice, concatenate, stack, pad."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules.families import HALVES, assert_offers, strategies, validate
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from paraxis.placement import Layout, Shard
from paraxis.rules import Call, Tensor
from paraxis.rules.split import bounds, pad, pieces, stride
from paraxis.rules.validation.draw import f
from paraxis.rules.validation.run import call_of

aten = torch.ops.aten

REPLICATED = {"aten.slice.Tensor (4, 8)"}  # every second index, from the middle


def test_every_strategy_for_the_samples_is_right() -> None:
    validate("split", REPLICATED)


@pytest.mark.parametrize(
    ("op", "args", "inputs", "outputs"),
    [
        (aten.slice.Tensor, (f(4, 12), 1, 2, 12), ("S(1: 0:7,0:2+7:12 of 12)",), ("S(1)",)),
        (aten.cat.default, ([f(4, 8), f(4, 8)], 1), ("S(1)", "S(1)"), ("S(1)",)),
    ],
)
def test_rule_offers_these_placements(op: Any, args: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    assert_offers(op, args, inputs, outputs)


def test_packed_segments() -> None:
    """``[q|k|v]`` splits into even thirds; two halves concatenate into ``[gate|up]``."""
    qkv = Layout.concat([(4, Layout.even(4, 2))] * 3)
    (split,) = strategies(aten.split_with_sizes.default, (f(2, 12), [4, 4, 4], 1), [Shard.of(1, qkv)])
    assert split.outputs == (Shard.of(1, Layout.even(4, 2)),) * 3
    joined = strategies(aten.cat.default, ([f(2, 8), f(2, 8)], 1), [Shard.of(1, HALVES)] * 2)
    assert [s.outputs for s in joined] == [(Shard.of(1, Layout.concat([(8, HALVES)] * 2)),)]


def test_pieces_bounds_and_strides() -> None:
    def of(op: Any, *args: Any) -> Any:
        return call_of(op, args, {}, 2)[0]

    assert pieces(of(aten.chunk.default, f(4, 12), 3, -1)) == (1, [4, 4, 4])
    assert bounds(of(aten.slice.Tensor, f(4, 12), -1, -4, 2**63 - 1)) == (1, 8, 12)
    assert bounds(of(aten.slice.Tensor, f(4, 12), 1, 0, 12, 2)) is None
    assert stride(of(aten.slice.Tensor, f(4, 12), 1, 1, None, 3)) == (1, 3)
    assert stride(of(aten.slice.Tensor, f(4, 8), 1, 3, None, 2)) is None


def test_padding_of_a_width_that_the_data_decides() -> None:
    """Frames up to a multiple of the patch, say: only the dimension that is padded stays replicated."""
    width = ShapeEnv().create_unbacked_symint()
    source, out = Tensor(0, (3, 4), torch.float32), Tensor(0, (3 + width, 4), torch.float32)
    padded = Call(aten.constant_pad_nd.default, (source, [0, 0, 0, width]), {}, (source,), (out,), world=2)
    stays = Shard.of(1, Layout.even(4, 2))
    assert [s.outputs[0] for s in pad(padded, [stays])] == [stays]
    assert not list(pad(padded, [Shard.of(0, Layout.even(3, 2))]))
