"""Layouts that a compiled program takes, and others."""

from __future__ import annotations

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from paraxis.runtime.stride_guard import Layout

GROWS = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])


def layout(*examples: torch.Tensor) -> Layout:
    """As a compiler sees these tensors, of which the third dimension may change."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return Layout(
        [mode.from_tensor(x, symbolic_context=GROWS, source=ConstantSource(f"x{k}")) for k, x in enumerate(examples)]
    )


def cache(length: int, room: int, heads: int = 8) -> torch.Tensor:
    return torch.zeros(2, heads, room, 4)[:, :, :length]


def test_as_compiled_for() -> None:
    known = layout(cache(5, 17), cache(5, 17))
    assert known.fits([cache(5, 17), cache(5, 17)])
    assert known.fits([cache(9, 17), cache(9, 17)]), "longer"
    assert known.fits([cache(40, 64), cache(40, 64)]), "more room"
    assert known.fits([cache(6, 6), cache(6, 6)]), "no room"


def test_other_layouts() -> None:
    known = layout(cache(5, 17), cache(5, 17))
    turned = cache(5, 17).transpose(1, 2).contiguous().transpose(1, 2)
    assert not known.fits([turned, turned]), "rows first"
    assert not known.fits([cache(5, 17), turned])
    assert not known.fits([cache(5, 17), cache(5, 64)]), "the compiler took their strides for the same"
    assert not known.fits([cache(5, 17, heads=4), cache(5, 17, heads=4)])
    assert not known.fits([cache(5, 17).double(), cache(5, 17).double()])
    assert not known.fits([cache(5, 17)[0], cache(5, 17)[0]])


def test_strides_that_follow_from_sizes() -> None:
    known = layout(cache(5, 5), cache(5, 5))
    assert known.fits([cache(7, 7), cache(7, 7)])
    assert not known.fits([cache(7, 8), cache(7, 8)])


def test_nothing_may_change() -> None:
    known = Layout([torch.zeros(2, 3), torch.zeros(4)])
    assert known.fits([torch.ones(2, 3), torch.ones(4)])
    assert not known.fits([torch.ones(3, 2).t(), torch.ones(4)])
    assert Layout([]).fits([])
