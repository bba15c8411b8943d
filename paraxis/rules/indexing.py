"""Lookups: embedding tables, index, gather, scatter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..placement import PARTIAL, REPLICATE, Layout, Placement, Shard
from .base import (
    UNPLACED,
    Call,
    InputPlacement,
    LocalCall,
    Localize,
    Strategy,
    is_one,
    is_partial,
    normalize_dim,
    same_size,
)
from .registry import builtin_rule

aten = torch.ops.aten


@builtin_rule(aten.embedding.default, samples="lookup", free=True)
def embedding(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Vocabulary-parallel: each rank looks up the token ids of its rows, and the results are partial.

    Where the gradient of a row depends on how often its id occurs, all ids must be there.
    """
    table, ids = placements
    rows: list[Layout] = []
    by_frequency = call.arg(3, "scale_grad_by_freq", False)
    if by_frequency or call.arg(4, "sparse", False):
        pass
    elif table is UNPLACED:
        rows = list(call.layouts.get((0, 0), ()))
    elif isinstance(table, Shard) and list(table.dims) == [0]:
        rows = [table.dims[0]]
    for layout in rows:
        size = call.inputs[0].shape[0]
        if layout.contiguous(size):
            local = _look_up_rows(layout, size)
            yield Strategy((Shard.of(0, layout), REPLICATE), (PARTIAL,), local, kind="vocab")
    if isinstance(table, Shard) and list(table.dims) == [1]:
        out = Shard.of(call.out.ndim - 1, table.dims[1])
        yield Strategy((table, REPLICATE), (out,), kind="column")
    if isinstance(ids, Shard) and not by_frequency:
        yield Strategy((REPLICATE, ids), (ids,))


def local_ids(ids: torch.Tensor, start: int, stop: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(index into the rows ``start`` to ``stop``, whether another rank holds the id; the index is then 0).

    An id outside of the table belongs to no rank: its index stays out of range on all ranks, so that all of them
    raise the error of an unsharded table.
    """
    elsewhere = ((ids >= 0) & (ids < start)) | ((ids >= stop) & (ids < size))
    return (ids - start).masked_fill(elsewhere, 0), elsewhere


def _look_up_rows(layout: Layout, size: int) -> Localize:
    """The look-up of a rank in its rows: zeros for the ids that others hold."""

    def localize(target: Any, args: list[Any], kwargs: dict[str, Any], rank: int) -> LocalCall:
        ((start, stop),) = layout.expand(size, rank)
        if stop - start == size:
            return target, args, kwargs

        def look_up_rows(rows: torch.Tensor, ids: torch.Tensor, padding: int = -1, *_: Any) -> torch.Tensor:
            index, elsewhere = local_ids(ids, start, stop, size)
            inside = padding - start if start <= padding < stop else -1
            found: torch.Tensor = aten.embedding.default(rows, index, inside)
            return found.masked_fill(elsewhere.unsqueeze(-1), 0)

        return look_up_rows, args, kwargs

    return localize


@builtin_rule(aten.index.Tensor, samples="lookup")
def index(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """The dimensions of the source that are not indexed may be sharded."""
    placement, indices = placements[0], call.args[1]
    if is_partial(placement):
        yield Strategy((PARTIAL, *[REPLICATE] * (len(placements) - 1)), (PARTIAL,))
    if not isinstance(placement, Shard):
        return
    touched = [d for d, i in enumerate(indices) if i is not None]
    if not touched or set(touched) & set(placement.dims):
        return
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in touched):
        return  # a mask may touch several dimensions
    adjacent = touched == list(range(touched[0], touched[-1] + 1))
    result = max(indices[d].ndim for d in touched)
    box: dict[int, Layout] = {}
    for d, layout in placement.layouts:
        before = sum(t < d for t in touched)
        box[d - before + (result if (not adjacent or d > touched[0]) else 0)] = layout
    yield Strategy((placement, *[REPLICATE] * (len(placements) - 1)), (Shard.of(box),))


@builtin_rule(aten.index_select.default, samples="lookup")
def index_select(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Like index, on one dimension."""
    placement, dim = placements[0], normalize_dim(call.args[1], call.inputs[0].ndim)
    if is_partial(placement):
        yield Strategy((PARTIAL, REPLICATE), (PARTIAL,))
    if isinstance(placement, Shard) and dim not in placement.dims:
        yield Strategy((placement, REPLICATE), (placement,))


@builtin_rule(aten.gather.default, samples="lookup")
def gather(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Both inputs sharded the same way, on dimensions of equal size other than the gathered one."""
    source, ids = call.inputs
    dim = normalize_dim(call.args[1], source.ndim)
    if is_partial(placements[0]):
        yield Strategy((PARTIAL, REPLICATE), (PARTIAL,))
    seen: set[Placement] = set()
    for placement in placements:
        if not isinstance(placement, Shard) or dim in placement.dims or placement in seen:
            continue
        seen.add(placement)
        if all(same_size(source.shape[d], ids.shape[d]) for d in placement.dims):
            yield Strategy((placement, placement), (placement,))


@builtin_rule(aten.index_put.default, samples="lookup")
def index_put(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Rows written or added at indices of adjacent dimensions; the others may be sharded. Linear in target and rows."""
    target, values, indices = call.inputs[0], call.inputs[-1], call.args[1]
    touched = [d for d, i in enumerate(indices) if i is not None]
    if not touched or touched != list(range(touched[0], touched[-1] + 1)):
        return
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in touched):
        return  # a mask may touch several dimensions
    if is_partial(placements[-1]) or is_partial(placements[0]):
        yield Strategy((PARTIAL, *[REPLICATE] * len(touched), PARTIAL), (PARTIAL,))
    extra = max(indices[d].ndim for d in touched) - len(touched)
    lift = target.ndim + extra - values.ndim  # rows may be broadcast
    row_dim = {d: d - lift + (extra if d > touched[-1] else 0) for d in range(target.ndim) if d not in touched}
    boxes = []
    if isinstance(placements[0], Shard):
        boxes.append(placements[0].dims)
    if isinstance(placements[-1], Shard):
        target_dim = {r: d for d, r in row_dim.items()}
        boxes.append({target_dim.get(d, -1): x for d, x in placements[-1].layouts})
    for box in boxes:
        if not box or any(d not in row_dim for d in box):
            continue
        rows = {row_dim[d]: x for d, x in box.items() if row_dim[d] >= 0}
        rows = {d: x for d, x in rows.items() if not is_one(values.shape[d])}
        row = Shard.of(rows) if rows else REPLICATE
        yield Strategy((Shard.of(box), *[REPLICATE] * len(touched), row), (Shard.of(box),))


@builtin_rule(aten.scatter.value, aten.scatter.src, aten.scatter_add.default, aten.scatter_reduce.two, samples="lookup")
def scatter(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """All inputs sharded the same way, on dimensions of equal size other than the scattered one."""
    target = call.inputs[0]
    dim = normalize_dim(call.args[1], target.ndim)
    linear = call.target in (aten.scatter.src, aten.scatter_add.default)
    if linear and (is_partial(placements[0]) or is_partial(placements[2])):
        yield Strategy((PARTIAL, REPLICATE, PARTIAL), (PARTIAL,))
    for placement in dict.fromkeys(placements):
        if isinstance(placement, Shard) and dim not in placement.dims:
            if all(same_size(target.shape[d], t.shape[d]) for t in call.inputs for d in placement.dims if t.ndim > d):
                yield Strategy((placement,) * len(call.inputs), (placement,))


@builtin_rule(aten.index_add.default, aten.index_copy.default, samples="lookup")
def index_add(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Rows added or written along one dimension; both sharded the same way on the others. Linear in target and rows."""
    dim = normalize_dim(call.args[1], call.inputs[0].ndim)
    if is_partial(placements[0]) or is_partial(placements[2]):
        yield Strategy((PARTIAL, REPLICATE, PARTIAL), (PARTIAL,))
    for placement in dict.fromkeys([placements[0], placements[2]]):
        if isinstance(placement, Shard) and dim not in placement.dims:
            yield Strategy((placement, REPLICATE, placement), (placement,))


@builtin_rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, samples="lookup")
def index_fill(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """One value along one dimension; the others may be sharded."""
    placement = placements[0]
    if isinstance(placement, Shard) and normalize_dim(call.args[1], call.inputs[0].ndim) not in placement.dims:
        yield Strategy((placement, *[REPLICATE] * (len(placements) - 1)), (placement,))


@builtin_rule(aten.histc.default, samples="lookup")
def histogram(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """With fixed bounds, the counts of all elements are the sum of the counts of the shards."""
    (placement,) = placements
    low, high = call.arg(2, "min", 0), call.arg(3, "max", 0)
    if isinstance(placement, Shard) and not placement.has_copies and isinstance(low, (int, float)) and high > low:
        yield Strategy((placement,), (PARTIAL,))
