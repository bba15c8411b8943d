"""Images and signals: operators along the last dimensions, independent for every example and channel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from ..placement import PARTIAL, REPLICATE, Layout, Shard
from .base import Call, InputPlacement, Strategy, is_partial, layouts_on
from .registry import builtin_rule

aten = torch.ops.aten


def _spatial(call: Call) -> int:
    """The number of last dimensions that the operator works along, from its name: ``avg_pool2d``."""
    return next(n for n in (1, 2, 3) if f"{n}d" in call.op_name)


def _channels(call: Call, placements: Sequence[InputPlacement], linear: bool) -> Iterable[Strategy]:
    """Batch and channels may be sharded; a linear operator takes partial inputs too."""
    placement = placements[0]
    if linear and is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,) * len(call.outputs))
    spatial = call.inputs[0].ndim - _spatial(call)  # the first spatial dimension
    if isinstance(placement, Shard) and all(d < spatial for d in placement.dims):
        if all(all(layout.ranges) for _, layout in placement.layouts):  # some operators refuse empty tensors
            yield Strategy((placement,), (placement,) * len(call.outputs))


@builtin_rule(
    aten.avg_pool1d.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_bicubic2d,
    aten.upsample_trilinear3d,
    samples="image",
)
def resample(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Averages, copies and interpolations, which are linear: batch and channels, or partial."""
    yield from _channels(call, placements, linear=True)


@builtin_rule(
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.max_pool1d_with_indices.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    samples="image",
)
def max_pool(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """The maximum of each window, and its index inside the channel: batch and channels."""
    yield from _channels(call, placements, linear=False)


@builtin_rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, aten.grid_sampler.default, samples="image")
def grid_sampler(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Samples of images at points: sharded on the batch, on the channels, or on the points."""
    image, grid = placements
    if is_partial(image):
        yield Strategy((PARTIAL, REPLICATE), (PARTIAL,))
    for layout in dict.fromkeys([*layouts_on(call, placements, 0, 0), *layouts_on(call, placements, 1, 0)]):
        if all(layout.ranges):
            yield Strategy((Shard.of(0, layout),) * 2, (Shard.of(0, layout),))
    for layout in layouts_on(call, placements, 0, 1):
        if all(layout.ranges):
            yield Strategy((Shard.of(1, layout), REPLICATE), (Shard.of(1, layout),))
    if isinstance(grid, Shard) and grid.layouts and all(0 < d < call.inputs[1].ndim - 1 for d in grid.dims):
        if all(all(layout.ranges) for _, layout in grid.layouts):
            yield Strategy((REPLICATE, grid), (Shard.of({d + 1: x for d, x in grid.layouts}),))


@builtin_rule(aten.im2col.default, aten.col2im.default, samples="image")
def patches(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Windows to columns and back: the values of a channel's window are adjacent in the channel dimension."""
    (placement,) = placements
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    out = call.target is aten.im2col.default
    window = prod(call.args[1 if out else 2])
    channels = call.inputs[0].ndim - (3 if out else 2)
    if not isinstance(placement, Shard) or any(d > channels for d in placement.dims):
        return
    box: dict[int, Layout] = {}
    for d, layout in placement.layouts:
        moved = layout if d != channels else layout.scale(window) if out else layout.unscale(window)
        if moved is None or not all(layout.ranges):
            return
        box[d] = moved
    yield Strategy((placement,), (Shard.of(box),))


@builtin_rule(aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default, samples="image")
def fourier(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """A linear map along some dimensions; the others may be sharded."""
    (placement,), n = placements, call.inputs[0].ndim
    dims: Any = {d % n for d in call.args[1]}
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if isinstance(placement, Shard) and not dims & set(placement.dims):
        if all(all(layout.ranges) for _, layout in placement.layouts):
            yield Strategy((placement,), (placement,))
