"""FlexAttention: attention whose scores and mask are functions of the indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..compat.flex_attention import FlexAttention
from ..placement import REPLICATE, SHARED, Layout, Placement, Shard
from .attention import aligned_heads
from .base import Call, InputPlacement, LocalCall, Strategy
from .registry import builtin_rule

_HEADS = 1


@builtin_rule(FlexAttention, samples="flex_attention")
def flex_attention(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Heads may be sharded. Functions that look at the head get its global index, so a rank needs consecutive heads.

    What the functions read is replicated. A block mask with a head dimension is sharded with the queries.
    """
    query, key = call.inputs[:2]
    for q, k in _layouts(placements):
        pair = Shard.of({_HEADS: q}), SHARED if k is None else Shard.of({_HEADS: k})
        if not aligned_heads(*pair, query.shape, key.shape):
            continue
        starts = _starts(q, query.shape[_HEADS])
        if call.target.reads_head and starts is None:
            continue
        inputs: list[Placement] = [pair[0], pair[1], pair[1]]
        masks = _block_masks(call)
        for tensor in call.inputs[3:]:
            per_head = tensor.index in masks and tensor.shape[_HEADS] == query.shape[_HEADS] != 1
            inputs.append(pair[0] if per_head else REPLICATE)
        yield Strategy(tuple(inputs), (pair[0],) * len(call.outputs), _localize(starts) if starts else None)


def _layouts(placements: Sequence[InputPlacement]) -> Iterable[tuple[Layout, Layout | None]]:
    """Layouts of the heads of queries and of keys to try: their own, one following the other, or all keys."""
    found: list[Layout | None] = [
        p.dims[_HEADS] if isinstance(p, Shard) and list(p.dims) == [_HEADS] else None for p in placements[:3]
    ]
    held = list(dict.fromkeys(x for x in found if x is not None))
    return [(q, k) for q in held for k in (*held, None)]


def _block_masks(call: Call) -> set[int]:
    """The inputs that are tensors of the block mask."""
    return {tensor.index for tensor in call.inputs[3 : 3 + call.target.block_tensors]}


def _starts(layout: Layout, heads: Any) -> list[int] | None:
    """The first head of every rank; None if one has heads that are not consecutive."""
    if not isinstance(heads, int):
        return None
    spans = [layout.expand(heads, rank) for rank in range(layout.world)]
    return [span[0][0] for span in spans] if all(len(span) == 1 for span in spans) else None


def _localize(starts: list[int]) -> Any:
    def localize(target: FlexAttention, args: list[Any], kwargs: dict[str, Any], rank: int) -> LocalCall:
        return target.from_head(starts[rank]), args, kwargs

    return localize
