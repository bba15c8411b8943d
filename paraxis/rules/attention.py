"""Scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..compat.packed_attention import PACKED_ATTENTION
from ..placement import REPLICATE, SHARED, Layout, Placement, Shard
from .base import Call, InputPlacement, Strategy, draws, is_one
from .registry import builtin_rule

aten = torch.ops.aten


@builtin_rule(aten.scaled_dot_product_attention.default, PACKED_ATTENTION, samples="attention")
def attention(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Heads and batch may be sharded. With grouped queries, each rank needs the KV heads of its query heads.

    The fourth tensor is a mask; of packed attention it says where sequences begin, and is replicated.
    """
    query, key = call.inputs[:2]
    n = query.ndim
    seen: set[tuple[Placement, ...]] = set()
    for q, k in _pairs(placements, n):
        if not aligned_heads(q, k, query.shape, key.shape, n) or (draws(call) and q.has_copies):
            continue
        inputs: list[Placement] = [q, k, k]
        for mask in call.inputs[3:]:
            lift = n - mask.ndim
            box = {d - lift: x for d, x in q.layouts if d >= lift and not is_one(mask.shape[d - lift])}
            inputs.append(Shard.of(box) if box else REPLICATE)
        if tuple(inputs) not in seen:
            seen.add(tuple(inputs))
            yield Strategy(tuple(inputs), (q,))


def _pairs(placements: Sequence[InputPlacement], n: int) -> Iterable[tuple[Shard, Shard]]:
    """Placements of query and key/value to try: their own, or one following the other."""
    batch = [p for p in placements[:3] if isinstance(p, Shard) and all(d < n - 2 for d in p.dims)]
    q = placements[0] if placements[0] in batch else None
    for k in dict.fromkeys([*(p for p in placements[1:3] if p in batch), *batch, SHARED]):
        if isinstance(q, Shard) and isinstance(k, Shard):
            yield q, k
        if isinstance(k, Shard) and k.layouts:
            yield k, k


def aligned_heads(q: Shard, k: Shard, q_shape: Sequence[int], k_shape: Sequence[int], n: int = 4) -> bool:
    """Whether each rank's query heads attend exactly to its KV heads. Each rank needs some: kernels may refuse none."""
    heads = n - 3
    if not all(all(x.ranges) for p in (q, k) for _, x in p.layouts):
        return False
    if {d: x for d, x in q.layouts if d != heads} != {d: x for d, x in k.layouts if d != heads}:
        return False
    if any(not q.dims[d].fits(q_shape[d]) for d in q.dims) or any(not k.dims[d].fits(k_shape[d]) for d in k.dims):
        return False
    lq, lk = q.dims.get(heads), k.dims.get(heads)
    if lq is None and lk is None:
        return True
    if heads < 0 or not isinstance(q_shape[heads], int) or not isinstance(k_shape[heads], int):
        return lq == lk
    if q_shape[heads] == k_shape[heads]:
        return lq == lk
    return _same_groups(lq, lk, q_shape[heads], k_shape[heads])


def _same_groups(lq: Layout | None, lk: Layout | None, nq: int, nk: int) -> bool:
    """Whether every rank holds, for each of its query heads in order, the KV head of that head's group."""
    layout = lq or lk
    assert layout is not None
    for rank in range(layout.world):
        q_heads = [i for a, b in (lq.expand(nq, rank) if lq else ((0, nq),)) for i in range(a, b)]
        k_heads = [i for a, b in (lk.expand(nk, rank) if lk else ((0, nk),)) for i in range(a, b)]
        if not k_heads or len(q_heads) % len(k_heads):
            return False
        each = len(q_heads) // len(k_heads)
        if any(k_heads[i // each] != head * nk // nq for i, head in enumerate(q_heads)):
            return False
    return True
