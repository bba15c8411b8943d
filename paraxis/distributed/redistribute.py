"""Moving a tensor from one placement to another: slicing and collectives, each with its conjugate.

Every function here takes a *local* tensor and its placement. The differentiable ones follow the gradient convention of
:mod:`paraxis.placement`; their docstrings give forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..placement import REPLICATE, Layout, Partial, Placement, Replicate, Shard, length_of, local_shape
from .collectives import all_gather, all_reduce, dense, reduce_scatter

# -- plain functions -----------------------------------------------------------------------------------------------


def slice_dim(tensor: torch.Tensor, dim: int, layout: Layout, rank: int) -> torch.Tensor:
    """The indices of ``dim`` that ``rank`` holds. The dimension may repeat the layout any number of times."""
    size, ranges, period = tensor.shape[dim], layout.ranges[rank], layout.period
    repeats = size // period
    if repeats == 1 or not ranges:
        spans = ranges
    elif len(ranges) == 1 and ranges[0] == (0, period):
        return tensor
    else:
        rows = tensor.unflatten(dim, (repeats, period))
        parts = [rows.narrow(dim + 1, a, b - a) for a, b in ranges]
        return (torch.cat(parts, dim + 1) if len(parts) > 1 else parts[0]).flatten(dim, dim + 1)
    parts = [tensor.narrow(dim, a, b - a) for a, b in spans]
    if not parts:
        return tensor.narrow(dim, 0, 0)
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def slice_box(tensor: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """The shard of a full tensor that ``rank`` holds."""
    if isinstance(placement, Shard):
        for dim, layout in placement.layouts:
            tensor = slice_dim(tensor, dim, layout, rank)
    return tensor


def _boxes(placement: Shard, shape: Sequence[int], world: int) -> list[tuple[torch.Tensor, ...]]:
    """For every rank the open mesh of indices of its shard, to index the full tensor with."""
    boxes, layouts = [], placement.dims
    for rank in range(world):
        dims = [_indices(layouts[d], n, rank) if d in layouts else torch.arange(n) for d, n in enumerate(shape)]
        boxes.append(torch.meshgrid(*dims, indexing="ij") if len(dims) > 1 else (dims[0],))
    return boxes


def _indices(layout: Layout, size: int, rank: int) -> torch.Tensor:
    """The indices that ``rank`` holds of a dimension; Python loops over the ranges of one repeat only."""
    held = [torch.arange(a, b) for a, b in layout.ranges[rank]]
    once = torch.cat(held) if held else torch.arange(0)
    starts = torch.arange(0, size, layout.period)
    return (starts[:, None] + once).flatten()


def gather_box(
    local: torch.Tensor, placement: Placement, shape: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """All-gather the full tensor from the shards of all ranks. A collective."""
    if not isinstance(placement, Shard) or not placement.layouts:
        return all_reduce(local, group) if isinstance(placement, Partial) else local
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world == 1:
        return local
    if len(placement.layouts) == 1:
        dim, layout = placement.layouts[0]
        if layout.is_even and layout.contiguous(int(shape[dim])):
            return all_gather(local, group, dim)
        if layout.is_even and layout.contiguous(layout.period):  # every repetition is sharded evenly
            rows = local.unflatten(dim, (int(shape[dim]) // layout.period, -1))
            return all_gather(rows, group, dim + 1).flatten(dim, dim + 1)
    shape = tuple(int(n) for n in shape)
    shapes = [local_shape(placement, shape, r) for r in range(world)]
    sizes = [int(torch.Size(s).numel()) for s in shapes]
    flat = local.reshape(-1)
    if sizes[rank] < max(sizes):
        flat = torch.nn.functional.pad(flat, (0, max(sizes) - sizes[rank]))
    pieces = all_gather(flat, group, 0).split(max(sizes))
    if len(placement.layouts) == 1:
        dim, layout = placement.layouts[0]
        return _assemble(pieces, sizes, shapes, dim, layout, shape)
    full = local.new_empty(shape)
    for piece, size, s, box in zip(pieces, sizes, shapes, _boxes(placement, shape, world), strict=True):
        full[tuple(i.to(full.device) for i in box)] = piece[:size].view(s)
    return full


def _assemble(
    pieces: Sequence[torch.Tensor],
    sizes: list[int],
    shapes: list[tuple[Any, ...]],
    dim: int,
    layout: Layout,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """The full tensor from shards of one dimension, in any layout."""
    full = pieces[0].new_empty(shape)
    repeats = shape[dim] // layout.period
    rows = full.unflatten(dim, (repeats, layout.period))
    for rank, piece in enumerate(pieces):
        ranges = layout.ranges[rank]
        shard, offset = piece[: sizes[rank]].view(shapes[rank]), 0
        shard = shard.unflatten(dim, (repeats, length_of(ranges)))
        for start, stop in ranges:
            rows.narrow(dim + 1, start, stop - start).copy_(shard.narrow(dim + 1, offset, stop - start))
            offset += stop - start
    return full


def sum_copies(
    local: torch.Tensor, placement: Shard, shape: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Sum every element over the ranks that hold a copy of it. A collective."""
    if dist.get_world_size(group) == 1:
        return local
    rank = dist.get_rank(group)
    if not placement.layouts:
        return all_reduce(local, group)
    full = local.new_zeros(tuple(int(n) for n in shape))
    box = _boxes(placement, full.shape, dist.get_world_size(group))[rank]
    index = tuple(i.to(local.device) for i in box)
    full[index] = local
    return all_reduce(full, group)[index]


def copies_of(placement: Placement, shape: Sequence[int], rank: int, device: torch.device) -> torch.Tensor | None:
    """The number of ranks that hold each element of the shard of ``rank``; ``None`` if no element has copies."""
    if not isinstance(placement, Shard) or not placement.layouts or not placement.has_copies:
        return None
    count = torch.zeros(tuple(int(n) for n in shape))
    boxes = _boxes(placement, count.shape, placement.world)
    for box in boxes:
        count[box] += 1
    return count[boxes[rank]].to(device)


# -- differentiable redistribution ---------------------------------------------------------------------------------
#
# Of a result that nobody differentiates the gradient is None, and so is that of what it was computed from: an optimizer
# leaves parameters without a gradient alone, and decays those whose gradient is zero.


class _Reduce(torch.autograd.Function):
    """Partial to replicated. Forward all-reduce, backward identity (Megatron's *g*)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grad, None


class _ReduceCoalesced(torch.autograd.Function):
    """Several partial tensors to replicated ones. Forward one all-reduce, backward identity, for each by itself."""

    @staticmethod
    def forward(ctx: Any, group: Any, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        flat = all_reduce(torch.cat([x.reshape(-1) for x in xs]), group)
        pieces = flat.split([x.numel() for x in xs])
        return tuple(piece.view(x.shape).clone() for piece, x in zip(pieces, xs, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *grads


class _Share(torch.autograd.Function):
    """Replicated to shared. Forward identity, backward all-reduce (Megatron's *f*)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if grad is None:
            return None, None
        return all_reduce(grad, ctx.group), None


class _Unshare(torch.autograd.Function):
    """Shared to replicated. Forward identity; backward divides the gradient by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.world = dist.get_world_size(group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if grad is None:
            return None, None
        return grad / ctx.world, None


class _Slice(torch.autograd.Function):
    """Replicated to sharded. Forward slices, backward all-gathers (and sums over copies)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, placement: Shard, group: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.placement, ctx.group, ctx.shape = placement, group, x.shape
        return dense(slice_box(x, placement, dist.get_rank(group)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        if not ctx.placement.has_copies:
            return gather_box(dense(grad), ctx.placement, ctx.shape, ctx.group), None, None
        summed = sum_copies(grad, ctx.placement, ctx.shape, ctx.group)
        return gather_box(summed, ctx.placement, ctx.shape, ctx.group), None, None


class _Gather(torch.autograd.Function):
    """Sharded to replicated. Forward all-gathers, backward slices (copies share the gradient)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, placement: Shard, shape: Sequence[int], group: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.placement, ctx.group, ctx.shape = placement, group, tuple(shape)
        return gather_box(dense(x), placement, shape, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        rank = dist.get_rank(ctx.group)
        local = slice_box(grad, ctx.placement, rank)
        copies = copies_of(ctx.placement, ctx.shape, rank, grad.device)
        return (local if copies is None else local / copies.to(local.dtype)), None, None, None


class _ReduceScatter(torch.autograd.Function):
    """Partial to sharded. Forward reduce-scatter, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, placement: Shard, group: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.placement, ctx.group, ctx.shape = placement, group, x.shape
        if len(placement.layouts) == 1:
            dim, layout = placement.layouts[0]
            if layout.is_even and layout.contiguous(x.shape[dim]):
                return reduce_scatter(x, group, dim)
            if layout.is_even and layout.contiguous(layout.period):  # every repetition is sharded evenly
                rows = x.unflatten(dim, (x.shape[dim] // layout.period, layout.period))
                return reduce_scatter(rows, group, dim + 1).flatten(dim, dim + 1)
        return dense(slice_box(all_reduce(x, group), placement, dist.get_rank(group)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        if ctx.placement.has_copies:
            grad = sum_copies(grad, ctx.placement, ctx.shape, ctx.group)
        return gather_box(dense(grad), ctx.placement, ctx.shape, ctx.group), None, None


class _MaskToRank0(torch.autograd.Function):
    """Replicated to partial. Forward identity on rank 0 and zeros on the others; backward identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x) if dist.get_rank(group) == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grad, None


def redistribute(
    x: torch.Tensor, source: Placement, target: Placement, shape: Sequence[Any], group: dist.ProcessGroup
) -> torch.Tensor:
    """The local tensor of ``target`` from that of ``source``; differentiable. ``shape`` is the global shape."""
    if (
        isinstance(source, Partial)
        and isinstance(target, Replicate)
        and not (x.requires_grad and torch.is_grad_enabled())
    ):
        return all_reduce(x, group)  # the most frequent case in decode steps
    if source == target:
        return x
    if isinstance(target, Partial):
        return _MaskToRank0.apply(redistribute(x, source, REPLICATE, shape, group), group)  # type: ignore[no-any-return]
    if isinstance(source, Replicate):
        if isinstance(target, Shard) and target.layouts:
            return _Slice.apply(x, target, group)  # type: ignore[no-any-return]
        return _Share.apply(x, group)  # type: ignore[no-any-return]
    if isinstance(source, Partial):
        if isinstance(target, Shard) and target.layouts:
            return _ReduceScatter.apply(x, target, group)  # type: ignore[no-any-return]
        x = _Reduce.apply(x, group)
    elif source.layouts:
        # Sizes of unsharded dimensions are read off the tensor: they may be dynamic.
        dims = source.dims
        full_shape = [int(n) if d in dims else x.shape[d] for d, n in enumerate(shape)]
        x = _Gather.apply(x, source, full_shape, group)
    elif isinstance(target, Shard):
        return slice_box(
            x, target, dist.get_rank(group)
        )  # its gradient is reduced already: a plain slice differentiates correctly
    else:
        x = _Unshare.apply(x, group)
    return redistribute(x, REPLICATE, target, shape, group)
