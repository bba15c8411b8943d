"""Operators that only rearrange dimensions: views as an algebra of dimension maps.

A reshape is a sequence of *groups*: input dimensions and output dimensions whose sizes have the same product.
Inside a group the dimensions are factors of one flattened index, and a layout moves between them by scaling (see
:class:`paraxis.placement.Layout`): flatten the sharded factors, then find the output factors that carry the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from ..placement import PARTIAL, Layout, Placement, Shard
from .base import Call, InputPlacement, LocalCall, Strategy, is_one, is_partial, normalize_dim, same_size
from .registry import builtin_rule

aten = torch.ops.aten


def groups(source: Sequence[Any], target: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Match input and output dimensions of a reshape into the smallest groups of equal product.

    Sizes may be symbolic; equal symbols match. Dimensions of size one join a neighbouring group.
    """
    result: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left: list[int] = []
        right: list[int] = []
        a = b = 1
        while True:
            if left and right and same_size(a, b):
                break
            if i < len(source) and (not left or j >= len(target) or (not same_size(a, b) and _less(a, b))):
                a, i = a * source[i], i + 1
                left.append(i - 1)
            elif j < len(target):
                b, j = b * target[j], j + 1
                right.append(j - 1)
            else:
                break
        result.append((left, right))
    return result


def _less(a: Any, b: Any) -> bool:
    """Whether the left side must grow. Symbols compare by their hints, which only serves to pair dimensions."""
    return _hint(a) <= _hint(b)


def _hint(a: Any) -> int:
    if isinstance(a, int):
        return a
    hint = a.node.hint
    return int(hint) if hint is not None else 1 << 30


def carry(placement: Shard, source: Sequence[Any], target: Sequence[Any]) -> Shard | None:
    """The placement after a reshape from ``source`` to ``target``, or None if shards would not stay shards."""
    dims = placement.dims
    out: dict[int, Layout] = {}
    for left, right in groups(source, target):
        sharded = [d for d in left if d in dims]
        if not sharded:
            continue
        flat = _flatten(left, sharded, dims, source)
        placed = _unflatten(flat, right, target) if flat is not None else None
        if placed is None:
            return None
        out.update(placed)
    return Shard.of(out)


def _flatten(left: list[int], sharded: list[int], dims: dict[int, Layout], source: Sequence[Any]) -> Layout | None:
    """The layout of the flattened group."""
    last = sharded[-1]
    inner = prod((source[d] for d in left if d > last), start=1)
    if not isinstance(inner, int):
        return None
    layout = dims[last]
    if len(sharded) == 2 and all(isinstance(source[d], int) for d in sharded):
        layout_or_none = _flatten_two(dims[sharded[0]], layout, left, sharded, source)
        if layout_or_none is None:
            return None
        layout = layout_or_none
    elif len(sharded) > 1:
        return None
    return layout.scale(inner) if inner > 1 else layout


def _flatten_two(
    outer: Layout, inner: Layout, left: list[int], sharded: list[int], source: Sequence[Any]
) -> Layout | None:
    """The layout of two sharded factors flattened into one: all combinations of their indices."""
    between = prod((source[d] for d in left if sharded[0] < d < sharded[1]), start=1)
    if not is_one(between):
        return None
    n, m = source[sharded[0]], source[sharded[1]]
    ranges = [
        [(i * m + a, i * m + b) for s, e in outer.expand(n, r) for i in range(s, e) for a, b in inner.expand(m, r)]
        for r in range(outer.world)
    ]
    return Layout.of(n * m, ranges)


def _unflatten(layout: Layout, right: list[int], target: Sequence[Any]) -> dict[int, Layout] | None:
    """Which output factor carries the layout of the flattened group."""
    inner = 1
    for d in reversed(right):
        size = target[d]
        factor = layout.unscale(inner) if isinstance(inner, int) else None
        if factor is None:
            return None
        if not isinstance(size, int) or size % factor.period == 0:
            if not is_one(size):
                return {d: factor}
        inner = inner * size
    return None


@builtin_rule(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten, aten.unflatten, samples="view"
)
def reshape(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Carry the layout through the groups of dimensions."""
    (placement,) = placements
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,), localize=partial(_local_view, placement=PARTIAL, call=call))
    if isinstance(placement, Shard):
        out = carry(placement, call.inputs[0].shape, call.out.shape)
        if out is not None:
            yield Strategy((placement,), (out,), localize=partial(_local_view, placement=out, call=call))


def _local_view(
    target: Any, args: list[Any], kwargs: dict[str, Any], rank: int, placement: Placement, call: Call
) -> LocalCall:
    """The view with local sizes. A shard may not be contiguous where the full tensor was, so it is a reshape."""
    if target in (aten.flatten.using_ints,):
        return target, args, kwargs
    if target is aten.unflatten.int:
        dim = normalize_dim(args[1], call.inputs[0].ndim)
        sizes = _local_sizes(list(args[2]), call.out.shape[dim : dim + len(args[2])], placement, rank, dim)
        return target, [args[0], dim, sizes], kwargs
    dims = placement.dims if isinstance(placement, Shard) else {}
    symbolic = [d for d in dims if not isinstance(call.out.shape[d], int)]
    sizes = _local_sizes(list(args[1]), call.out.shape, placement, rank, 0)
    if not symbolic:
        return aten.reshape.default, [args[0], sizes], {}
    for d in symbolic:
        sizes[d] = args[1][d]  # the global size, known at run time
    parts = [(d, dims[d].period, dims[d].local_size(dims[d].period, rank)) for d in symbolic]
    return _reshape_parts, [args[0], sizes], {"parts": parts}


def _reshape_parts(x: torch.Tensor, sizes: list[int], parts: list[tuple[int, int, int]]) -> torch.Tensor:
    """A reshape in which some global sizes, multiples of ``period``, become local at run time."""
    sizes = list(sizes)
    for dim, period, held in parts:
        if sizes[dim] != -1:
            sizes[dim] = sizes[dim] // period * held
    return x.reshape(sizes)


def _local_sizes(sizes: list[Any], shape: Sequence[Any], placement: Placement, rank: int, first: int) -> list[Any]:
    """Replace the sizes of sharded dimensions by local ones, leaving at most one -1."""
    dims = placement.dims if isinstance(placement, Shard) else {}
    result = []
    for i, (size, full) in enumerate(zip(sizes, shape, strict=True)):
        layout = dims.get(i + first)
        if layout is None:
            result.append(full if size == -1 and isinstance(full, int) else size)
        elif isinstance(full, int):
            result.append(layout.local_size(full, rank))
        else:
            result.append(-1)  # a symbolic size times a constant
    return result


def _permutation(call: Call) -> list[int]:
    """Output dimension to input dimension."""
    n, name = call.inputs[0].ndim, call.op_name
    order = list(range(n))
    if name == "permute":
        return [normalize_dim(d, n) for d in call.arg(1, "dims")]
    if name in ("transpose", "swapaxes", "swapdims"):
        a, b = normalize_dim(call.args[1], n), normalize_dim(call.args[2], n)
    elif name in ("t", "numpy_T", "mT", "mH", "adjoint"):
        if name == "numpy_T" or n < 2:
            return order[::-1]
        a, b = n - 2, n - 1
    else:
        source, target = call.args[1], call.args[2]
        source = [normalize_dim(d, n) for d in ([source] if isinstance(source, int) else source)]
        target = [normalize_dim(d, n) for d in ([target] if isinstance(target, int) else target)]
        rest = iter([d for d in order if d not in source])
        return [source[target.index(d)] if d in target else next(rest) for d in order]
    order[a], order[b] = order[b], order[a]
    return order


@builtin_rule(
    aten.permute,
    aten.transpose,
    aten.t,
    aten.numpy_T,
    aten.mT,
    aten.swapaxes,
    aten.swapdims,
    aten.movedim,
    samples="view",
)
def permute(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Dimensions are permuted, and their layouts with them."""
    (placement,) = placements
    order = _permutation(call)
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if isinstance(placement, Shard):
        yield Strategy((placement,), (Shard.of({order.index(d): x for d, x in placement.layouts}),))


@builtin_rule(aten.unsqueeze.default, aten.squeeze, samples="view")
def squeeze(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Dimensions of size one come and go."""
    (placement,) = placements
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if not isinstance(placement, Shard):
        return
    source, n = call.inputs[0], call.inputs[0].ndim
    if call.target is aten.unsqueeze.default:
        dim = normalize_dim(call.args[1], n + 1)
        yield Strategy((placement,), (Shard.of({d + (d >= dim): x for d, x in placement.layouts}),))
        return
    dims = call.arg(1, "dim")
    dims = range(n) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {normalize_dim(d, n) for d in dims if is_one(source.shape[normalize_dim(d, n)])}
    if not gone & set(placement.dims):
        moved = {d - sum(g < d for g in gone): x for d, x in placement.layouts}
        # The dimensions by number: a dimension whose local size is one must stay if its global size is larger.
        yield Strategy((placement,), (Shard.of(moved),), localize=partial(_exact_squeeze, dims=sorted(gone)))


def _exact_squeeze(target: Any, args: list[Any], kwargs: dict[str, Any], rank: int, dims: list[int]) -> LocalCall:
    return aten.squeeze.dims, [args[0], dims], {}


@builtin_rule(aten.expand.default, samples="view")
def expand(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """A dimension of size one grows. Ranks that hold the same elements may each make a part of the new ones."""
    (placement,) = placements
    source, out = call.inputs[0], call.out
    lift = out.ndim - source.ndim
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    box = {d + lift: x for d, x in placement.layouts} if isinstance(placement, Shard) else {}
    if isinstance(placement, Shard):
        yield _expanded(placement, box, call)
    for d in range(out.ndim):
        grows = d < lift or (is_one(source.shape[d - lift]) and not is_one(out.shape[d]))
        if not grows or not isinstance(out.shape[d], int):
            continue
        layout = _over_replicas(box, out.shape[d], call.world)
        if layout is not None:
            before = placement if isinstance(placement, Shard) else Shard(())
            yield _expanded(before, {**box, d: layout}, call)


def _expanded(before: Shard, box: dict[int, Layout], call: Call) -> Strategy:
    out = Shard.of(box)
    return Strategy((before,), (out,), localize=partial(_local_expand, placement=out, call=call))


def _over_replicas(box: dict[int, Layout], size: int, world: int) -> Layout | None:
    """Split ``size`` new indices among the ranks that hold the same elements; None if no two ranks do."""
    if len(box) > 1:
        return None
    if not box:
        return Layout.even(size, world) if size >= world else None
    (layout,) = box.values()
    places = [layout.replica(rank) for rank in range(layout.world)]
    if all(count == 1 for _, count in places) or any(size < count for _, count in places):
        return None
    return Layout.of(size, [Layout.even(size, count).expand(size, position) for position, count in places])


def _local_expand(
    target: Any, args: list[Any], kwargs: dict[str, Any], rank: int, placement: Shard, call: Call
) -> LocalCall:
    sizes, dims = list(args[1]), placement.dims
    for d, layout in dims.items():
        if sizes[d] == -1:
            continue
        full = call.out.shape[d]
        sizes[d] = layout.local_size(full, rank) if isinstance(full, int) else -1
    return target, [args[0], sizes], kwargs


@builtin_rule(aten.repeat.default, samples="view")
def repeat(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Copies along a dimension: a layout is periodic, so it repeats."""
    (placement,) = placements
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if not isinstance(placement, Shard):
        return
    source = call.inputs[0]
    lift = call.out.ndim - source.ndim
    box: dict[int, Layout] = {}
    for d, layout in placement.layouts:
        if not isinstance(source.shape[d], int):
            return
        box[d + lift] = Layout.concat([(source.shape[d], layout)])
    yield Strategy((placement,), (Shard.of(box),))


@builtin_rule(aten.view_as_complex.default, aten.view_as_real.default, samples="view")
def complex_view(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Pairs of numbers in the last dimension become complex numbers, or the reverse."""
    (placement,) = placements
    pairs = call.inputs[0].ndim - 1 if call.target is aten.view_as_complex.default else None
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if isinstance(placement, Shard) and pairs not in placement.dims:
        yield Strategy((placement,), (placement,))
