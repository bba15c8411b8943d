"""Split, slice, concatenate, stack, pad: where packed layouts come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ..placement import PARTIAL, Layout, Placement, Shard
from .base import Call, InputPlacement, LocalCall, Strategy, is_partial, normalize_dim
from .registry import builtin_rule

aten = torch.ops.aten


def pieces(call: Call) -> tuple[int, list[int]] | None:
    """(dimension, sizes) of a split, chunk or tensor_split; None if sizes are symbolic."""
    n = call.inputs[0].ndim
    name = call.op_name
    dim = normalize_dim(call.arg(2 if name != "unbind" else 1, "dim", 0), n)
    sizes = [1 if name == "unbind" else out.shape[dim] for out in call.outputs]
    return (dim, sizes) if all(isinstance(s, int) for s in sizes) else None


@builtin_rule(
    aten.split_with_sizes,
    aten.split,
    aten.chunk,
    aten.tensor_split,
    aten.unsafe_chunk,
    aten.unsafe_split,
    samples="split",
)
def split(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Each piece gets its slice of the layout."""
    (placement,), found = placements, pieces(call)
    count = len(call.outputs)
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,) * count)
    if not isinstance(placement, Shard):
        return
    if normalize_dim(call.arg(2, "dim", 0), call.inputs[0].ndim) not in placement.dims:
        yield Strategy((placement,), (placement,) * count)
        return
    if found is None:
        return
    dim, sizes = found
    layout, outputs, start = placement.dims[dim], [], 0
    for size in sizes:
        outputs.append(Shard.of({**placement.dims, dim: layout.slice(sum(sizes), start, start + size)}))
        start += size
    yield Strategy((placement,), tuple(outputs), localize=partial(_local_split, dim=dim, sizes=sizes, layout=layout))


def _local_split(
    target: Any, args: list[Any], kwargs: dict[str, Any], rank: int, dim: int, sizes: list[int], layout: Layout
) -> LocalCall:
    local, start = [], 0
    for size in sizes:
        a, b = layout.local_slice(sum(sizes), start, start + size, rank)
        local.append(b - a)
        start += size
    return aten.split_with_sizes.default, [args[0], local, dim], {}


@builtin_rule(aten.unbind.int, samples="split")
def unbind(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """A dimension becomes a tuple; the others may be sharded."""
    (placement,) = placements
    dim = normalize_dim(call.arg(1, "dim", 0), call.inputs[0].ndim)
    yield from _without(placement, dim, len(call.outputs))


@builtin_rule(aten.select.int, samples="split")
def select(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """One index of a dimension that is not sharded."""
    (placement,) = placements
    yield from _without(placement, normalize_dim(call.args[1], call.inputs[0].ndim), 1)


def _without(placement: InputPlacement, dim: int, count: int) -> Iterable[Strategy]:
    """A dimension disappears; there are ``count`` results."""
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,) * count)
    if isinstance(placement, Shard) and dim not in placement.dims:
        out = Shard.of({d - (d > dim): x for d, x in placement.layouts})
        yield Strategy((placement,), (out,) * count)


def stride(call: Call) -> tuple[int, int] | None:
    """(dimension, step) of a slice that takes every ``step``-th index of the dimension: one of interleaved parts."""
    dim = normalize_dim(call.arg(1, "dim", 0), call.inputs[0].ndim)
    size, step = call.inputs[0].shape[dim], call.arg(4, "step", 1)
    start, stop = call.arg(2, "start", None) or 0, call.arg(3, "end", None)
    if not all(isinstance(v, int) for v in (size, step, start)) or step < 2 or size % step or not 0 <= start < step:
        return None
    return (dim, step) if stop is None or (isinstance(stop, int) and stop >= size) else None


def bounds(call: Call) -> tuple[int, int, int] | None:
    """(dimension, start, stop) of a slice with step one and known bounds."""
    dim = normalize_dim(call.arg(1, "dim", 0), call.inputs[0].ndim)
    size, step = call.inputs[0].shape[dim], call.arg(4, "step", 1)
    start, stop = call.arg(2, "start", None) or 0, call.arg(3, "end", None)
    stop = size if stop is None else stop
    if step != 1 or not all(isinstance(v, int) for v in (size, start, stop)):
        return None
    start = max(0, start + size) if start < 0 else min(start, size)
    stop = max(0, stop + size) if stop < 0 else min(stop, size)
    return dim, start, max(start, stop)


@builtin_rule(aten.slice.Tensor, samples="split")
def slice_(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """A range of a dimension: if it is sharded, each rank takes what it holds of the range."""
    (placement,) = placements
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if not isinstance(placement, Shard):
        return
    dim = normalize_dim(call.arg(1, "dim", 0), call.inputs[0].ndim)
    if dim not in placement.dims:
        yield Strategy((placement,), (placement,))
        return
    strided, found = stride(call), bounds(call)
    if strided is not None:
        part = placement.dims[dim].unscale(strided[1])  # groups of interleaved indices stay together
        if part is not None:
            yield Strategy((placement,), (Shard.of({**placement.dims, dim: part}),))
    if found is None:
        return
    _, start, stop = found
    size, layout = call.inputs[0].shape[dim], placement.dims[dim]
    if start == 0 and stop == size:
        yield Strategy((placement,), (placement,))
    elif stop > start:
        part = layout.slice(size, start, stop)
        if all(part.ranges):  # no rank is left with nothing
            out = Shard.of({**placement.dims, dim: part})
            local = partial(_local_slice, dim=dim, size=size, start=start, stop=stop, layout=layout)
            yield Strategy((placement,), (out,), localize=local)


def _local_slice(
    target: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    rank: int,
    dim: int,
    size: int,
    start: int,
    stop: int,
    layout: Layout,
) -> LocalCall:
    a, b = layout.local_slice(size, start, stop, rank)
    return target, [args[0], dim, a, b], {}


def _is_empty(shape: tuple[Any, ...]) -> bool:
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0


@builtin_rule(aten.cat.default, samples="split")
def cat(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Sharded on another dimension, all inputs the same way; sharded on this dimension, the result is packed."""
    real = [t for t in call.inputs if not _is_empty(t.shape)]
    if not real:
        return
    dim = normalize_dim(call.arg(1, "dim", 0), call.out.ndim)
    skip = [_is_empty(t.shape) for t in call.inputs]
    if any(is_partial(p) for p in placements):
        yield Strategy((PARTIAL,) * len(placements), (PARTIAL,))
    packed = _packed(call, placements, dim, skip)
    seen: set[Placement] = set()
    for placement in placements:
        if isinstance(placement, Shard) and placement not in seen and dim not in placement.dims:
            seen.add(placement)
            inputs = tuple(Shard(()) if s else placement for s in skip)
            yield Strategy(inputs, (placement,))
    if packed is not None:
        yield packed


def _packed(call: Call, placements: Sequence[InputPlacement], dim: int, skip: list[bool]) -> Strategy | None:
    """All inputs sharded on the dimension they are concatenated along."""
    box: dict[int, Layout] | None = None
    parts: list[tuple[int, Layout]] = []
    inputs: list[Placement] = []
    for tensor, placement, empty in zip(call.inputs, placements, skip, strict=True):
        if empty:
            inputs.append(Shard(()))
            continue
        if not isinstance(placement, Shard) or dim not in placement.dims or not isinstance(tensor.shape[dim], int):
            return None
        others = {d: x for d, x in placement.layouts if d != dim}
        if box is not None and others != box:
            return None
        box = others
        inputs.append(placement)
        parts.append((tensor.shape[dim], placement.dims[dim]))
    out = Shard.of({**(box or {}), dim: Layout.concat(parts)})
    return Strategy(tuple(inputs), (out,))


@builtin_rule(aten.stack.default, samples="split")
def stack(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """A new dimension; all inputs are sharded the same way."""
    dim = normalize_dim(call.arg(1, "dim", 0), call.out.ndim)
    if any(is_partial(p) for p in placements):
        yield Strategy((PARTIAL,) * len(placements), (PARTIAL,))
    for placement in {p for p in placements if isinstance(p, Shard)}:
        out = Shard.of({d + (d >= dim): x for d, x in placement.layouts})
        yield Strategy((placement,) * len(placements), (out,))


@builtin_rule(aten.constant_pad_nd.default, samples="split")
def pad(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Padding of dimensions that are not sharded. A width that only the data decides counts as padding."""
    (placement,), n = placements, call.inputs[0].ndim
    widths = call.args[1]
    if is_partial(placement) and not call.arg(2, "value", 0):
        yield Strategy((PARTIAL,), (PARTIAL,))
    padded = {
        n - 1 - k for k in range(len(widths) // 2) if not (_is_zero(widths[2 * k]) and _is_zero(widths[2 * k + 1]))
    }
    if isinstance(placement, Shard) and not padded & set(placement.dims):
        yield Strategy((placement,), (placement,))


def _is_zero(width: Any) -> bool:
    """Whether a width is the number zero. False for a symbol: comparing one may fail if the data decides it."""
    return isinstance(width, int) and width == 0


@builtin_rule(aten.slice_scatter.default, aten.select_scatter.default, samples="split")
def scatter_part(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """A part of a dimension that is not sharded is replaced. Linear in both inputs."""
    dim = normalize_dim(call.arg(2, "dim", 0), call.inputs[0].ndim)
    gone = call.target is aten.select_scatter.default
    if any(is_partial(p) for p in placements):
        yield Strategy((PARTIAL, PARTIAL), (PARTIAL,))
    boxes = [p.dims for p in placements[:1] if isinstance(p, Shard)]
    if isinstance(placements[1], Shard):
        boxes.append({d + (gone and d >= dim): x for d, x in placements[1].layouts})
    for box in boxes:
        if box and dim not in box:
            inner = Shard.of({d - (gone and d > dim): x for d, x in box.items()})
            yield Strategy((Shard.of(box), inner), (Shard.of(box),))


@builtin_rule(aten.unfold.default, samples="split")
def windows(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Windows along a dimension that is not sharded, as a new last one."""
    (placement,) = placements
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if isinstance(placement, Shard) and normalize_dim(call.args[1], call.inputs[0].ndim) not in placement.dims:
        yield Strategy((placement,), (placement,))


@builtin_rule(aten.diagonal.default, samples="split")
def diagonal(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Two dimensions become one, the last; the others may be sharded."""
    (placement,), n = placements, call.inputs[0].ndim
    gone = {normalize_dim(call.arg(2, "dim1", 0), n), normalize_dim(call.arg(3, "dim2", 1), n)}
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if isinstance(placement, Shard) and not gone & set(placement.dims):
        yield Strategy((placement,), (Shard.of({d - sum(g < d for g in gone): x for d, x in placement.layouts}),))


@builtin_rule(aten.tril.default, aten.triu.default, samples="split")
def triangle(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """The lower or upper triangle of every matrix: the batch may be sharded. Linear."""
    (placement,) = placements
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if isinstance(placement, Shard) and all(d < call.inputs[0].ndim - 2 for d in placement.dims):
        yield Strategy((placement,), (placement,))
