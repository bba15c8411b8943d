"""Layer, RMS, group and batch norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ..placement import REPLICATE, Layout, Placement, Shard
from .base import Call, InputPlacement, LocalCall, Strategy, Tensor, layouts_on
from .registry import builtin_rule

aten = torch.ops.aten


@builtin_rule(aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default, samples="norm", free=True)
def norm(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Rows are independent: the leading dimensions may be sharded; weight and bias are replicated."""
    placement = placements[0]
    first = call.inputs[0].ndim - len(call.args[1])
    if isinstance(placement, Shard) and all(d < first for d in placement.dims):
        others = (REPLICATE,) * (len(call.inputs) - 1)
        yield Strategy((placement, *others), (placement,) * len(call.outputs))


@builtin_rule(aten.native_group_norm.default, samples="norm")
def group_norm(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Groups are independent: the batch may be sharded, or the groups, weight and bias with them."""
    batch, channels, groups = call.args[3], call.args[4], call.args[6]
    vectors = len(call.inputs) - 1
    for layout in layouts_on(call, placements, 0, 0):
        if all(layout.ranges) and isinstance(batch, int):
            rows = Shard.of(0, layout)
            local = partial(_local_sizes, sizes={3: (batch, layout)})
            yield Strategy((rows, *[REPLICATE] * vectors), (rows,) * 3, localize=local)
    found = layouts_on(call, placements, 0, 1)
    found += [x for k in range(vectors) for x in layouts_on(call, placements, k + 1, 0)]
    for layout in dict.fromkeys(found):
        by_group = layout.unscale(channels // groups)
        if by_group is None or not by_group.fits(groups) or not all(by_group.ranges):
            continue  # the operator refuses a rank without groups
        data, statistics = Shard.of(1, layout), Shard.of(1, by_group)
        local = partial(_local_sizes, sizes={4: (channels, layout), 6: (groups, by_group)})
        outputs = (data, statistics, statistics)
        yield Strategy((data, *[Shard.of(0, layout)] * vectors), outputs, localize=local)


def _local_sizes(
    target: Any, args: list[Any], kwargs: dict[str, Any], rank: int, sizes: dict[int, tuple[int, Layout]]
) -> LocalCall:
    for position, (size, layout) in sizes.items():
        args[position] = layout.local_size(size, rank)
    return target, args, kwargs


@builtin_rule(aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default, samples="norm")
def batch_norm(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Channels are independent, and so are examples where the statistics are inputs (not in training)."""
    vectors = call.inputs[1:]
    training = call.target is aten.batch_norm.default and call.args[5]
    if training and any(isinstance(x, Tensor) for x in call.args[3:5]):
        return  # the running statistics are written into replicated buffers
    for dim in (1,) if training else (1, 0):
        found = layouts_on(call, placements, 0, dim)
        if dim == 1:
            found += [x for k in range(len(vectors)) for x in layouts_on(call, placements, k + 1, 0)]
        for layout in dict.fromkeys(found):
            if all(layout.ranges):
                vector: Placement = Shard.of(0, layout) if dim == 1 else REPLICATE
                outputs = [_statistics(t, layout) if k else Shard.of(dim, layout) for k, t in enumerate(call.outputs)]
                yield Strategy((Shard.of(dim, layout), *[vector] * len(vectors)), tuple(outputs))


def _statistics(tensor: Tensor, layout: Layout) -> Placement:
    """The placement of the saved statistics, which are empty where they were not computed."""
    return Shard(()) if tensor.shape == (0,) else Shard.of(0, layout)
