"""Convolutions: sharded on the batch, on output channels, on input channels (partial results), or by group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ..placement import PARTIAL, REPLICATE, Layout, Placement, Shard
from .base import Call, InputPlacement, LocalCall, Strategy, layouts_on
from .registry import builtin_rule

aten = torch.ops.aten


@builtin_rule(aten.convolution.default, samples="convolution", free=True)
def convolution(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Input or output channels of a plain one; the groups of a grouped one, which are independent convolutions."""
    data, weight = call.inputs[0], call.inputs[1]
    groups, transposed = call.args[8], call.args[6]
    if data.ndim != weight.ndim:
        return
    placement = placements[0]
    if isinstance(placement, Shard) and list(placement.dims) == [0]:
        yield _strategy(call, placement, REPLICATE, REPLICATE, placement)
    w_out, w_in = (1, 0) if transposed else (0, 1)
    if groups == 1:
        for layout in _layouts(call, placements, 1, w_out):
            column, vector, out = Shard.of(w_out, layout), Shard.of(0, layout), Shard.of(1, layout)
            yield _strategy(call, REPLICATE, column, vector, out, "column")
        for layout in [*_layouts(call, placements, 0, 1), *_layouts(call, placements, 1, w_in)]:
            if not layout.has_copies:
                yield _strategy(call, Shard.of(1, layout), Shard.of(w_in, layout), PARTIAL, PARTIAL, "row")
    elif not transposed:
        yield from _by_group(call, placements, groups)


def _by_group(call: Call, placements: Sequence[InputPlacement], groups: int) -> Iterable[Strategy]:
    """Input and output channels sharded by group."""
    data, weight = call.inputs[0], call.inputs[1]
    per_in, per_out = data.shape[1] // groups, weight.shape[0] // groups
    found = [layout.unscale(per_in) for layout in _layouts(call, placements, 0, 1)]
    found += [layout.unscale(per_out) for layout in _layouts(call, placements, 1, 0)]
    for layout in dict.fromkeys(found):
        if layout is None or not layout.fits(groups):
            continue
        out = layout.scale(per_out)
        local = partial(_local_groups, groups=groups, layout=layout)
        yield _strategy(
            call, Shard.of(1, layout.scale(per_in)), Shard.of(0, out), Shard.of(0, out), Shard.of(1, out), "", local
        )


def _local_groups(
    target: Any, args: list[Any], kwargs: dict[str, Any], rank: int, groups: int, layout: Layout
) -> LocalCall:
    return target, [*args[:8], layout.local_size(groups, rank)], kwargs


def _strategy(
    call: Call, data: Placement, weight: Placement, bias: Placement, out: Placement, kind: str = "", local: Any = None
) -> Strategy:
    inputs = (data, weight, bias) if len(call.inputs) == 3 else (data, weight)
    return Strategy(inputs, (out,), localize=local, kind=kind)


def _layouts(call: Call, placements: Sequence[InputPlacement], index: int, dim: int) -> list[Layout]:
    """Layouts in which every rank has channels: a convolution needs at least one."""
    return [layout for layout in layouts_on(call, placements, index, dim) if all(layout.ranges)]
