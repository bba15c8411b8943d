"""Grouped matmuls: the experts of a mixture of experts (MoE), each on its own rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..compat.transformers import grouped_mm_fallback
from ..placement import PARTIAL, REPLICATE, Layout, Shard
from .base import Call, InputPlacement, Strategy, Structures, layouts_on
from .registry import builtin_rule

aten = torch.ops.aten


def operators() -> list[Any]:
    """torch's operator, and the one transformers falls back to where torch has no kernel."""
    found: list[Any] = [aten._grouped_mm.default] if hasattr(aten, "_grouped_mm") else []
    fallback = grouped_mm_fallback()
    return found if fallback is None else [*found, fallback]


def _unit(call: Call) -> int:
    """How many elements must stay together: torch's kernel needs rows of a multiple of 16 bytes."""
    return max(16 // call.inputs[1].dtype.itemsize, 1) if call.target is not _fallback() else 1


def _aligned_rows(call: Call) -> Structures:
    """Widths are split in units of 16 bytes, if they are multiples of it, and not at all otherwise."""
    unit = _unit(call)
    found: Structures = {}
    if unit > 1 and len(call.inputs) == 3:
        for i, dim in ((0, 1), (1, 1), (1, 2)):
            size = call.inputs[i].shape[dim]
            if isinstance(size, int):
                found[i, dim] = [((size, unit if size % unit == 0 else size),)]
    return found


@builtin_rule(*operators(), samples="grouped", free=True, structures=_aligned_rows)
def grouped_mm(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """``x[rows of e] @ w[e]``: tensor parallelism of every expert, column-parallel or row-parallel."""
    if len(call.inputs) != 3 or call.inputs[0].ndim != 2 or call.inputs[1].ndim != 3:
        return
    for layout in layouts_on(call, placements, 1, 2):
        if not _aligned(call, layout, call.inputs[1].shape[2]):
            continue
        inputs = (REPLICATE, Shard.of(2, layout), REPLICATE)
        yield Strategy(inputs, (Shard.of(1, layout),), kind="column")
    for layout in [*layouts_on(call, placements, 0, 1), *layouts_on(call, placements, 1, 1)]:
        if not layout.has_copies and _aligned(call, layout, call.inputs[1].shape[1]):  # copies would be summed twice
            yield Strategy((Shard.of(1, layout), Shard.of(1, layout), REPLICATE), (PARTIAL,), kind="row")


def _aligned(call: Call, layout: Layout, size: Any) -> bool:
    return all(layout.local_size(size, rank) % _unit(call) == 0 for rank in range(layout.world))


def _fallback() -> Any:
    packet = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return None if packet is None else packet.default
