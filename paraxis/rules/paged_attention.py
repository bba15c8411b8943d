"""Paged attention: tokens of many sequences in one row, with a paged KV cache that the graph does not see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..compat.paged_attention import PAGED_ATTENTION
from ..placement import SHARED, Layout, Placement, Shard
from .attention import aligned_heads
from .base import Call, InputPlacement, LocalCall, Localize, Strategy
from .registry import builtin_rule

_HEADS = 1


@builtin_rule(PAGED_ATTENTION, samples="paged_attention")
def paged_attention(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Heads may be sharded; each rank needs the KV heads of its query heads, and is told which they are.

    Keys and values that all ranks need are replicated, not shared: no rank leaves out any of their gradient.
    """
    query, key = call.inputs[:2]
    for q, k in _layouts(placements):
        pair = Shard.of({_HEADS: q}), SHARED if k is None else Shard.of({_HEADS: k})
        if not aligned_heads(*pair, query.shape, key.shape):
            continue
        inputs: list[Placement] = [pair[0], pair[1], pair[1]]
        inputs += [Shard.of({0: q}) for _ in call.inputs[3:]]
        localize = None if k is None else _localize(k, key.shape[_HEADS])
        yield Strategy(tuple(inputs), (pair[0],), localize)


def _layouts(placements: Sequence[InputPlacement]) -> Iterable[tuple[Layout, Layout | None]]:
    """Layouts of the heads of queries and of keys to try: their own, one following the other, or all keys."""
    found: list[Layout | None] = [
        p.dims[_HEADS] if isinstance(p, Shard) and list(p.dims) == [_HEADS] else None for p in placements[:3]
    ]
    held = list(dict.fromkeys(x for x in found if x is not None))
    return [(q, k) for q in held for k in (*held, None)]


def _localize(layout: Layout, heads: int) -> Localize:
    """The call of a rank names the KV heads that it has."""
    position = 7

    def localize(target: Any, args: list[Any], kwargs: dict[str, Any], rank: int) -> LocalCall:
        mine = [i for a, b in layout.expand(heads, rank) for i in range(a, b)]
        return target, [*args[:position], mine], kwargs

    return localize
