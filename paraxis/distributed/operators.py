"""Redistributions as operators of the local program: ``paraxis.all_reduce(x, 'sum', group)`` and its kin.

A partitioned graph holds these operators, so that a printed program shows what a rank communicates, and passes,
Inductor, the listing and the report find a collective by its identity. Arguments are plain data: a group is its name,
a placement is text (:func:`encode`). Each operator is differentiable and decomposes, under a compiler, into torch's
functional collectives or the operators of shared memory (:mod:`paraxis.distributed.collectives`).

==================== ======================= ==============================================
operator             from, to                backward
==================== ======================= ==============================================
all_reduce           partial, replicated     nothing (Megatron's *g*)
all_reduce_coalesced several partial tensors nothing
reduce_scatter       partial, sharded        all-gather
all_gather           sharded, replicated     takes the shard
take_shard           replicated, sharded     all-gather (nothing for a shared tensor)
share                replicated, shared      all-reduce (Megatron's *f*)
unshare              shared, replicated      an equal part on every rank
mask_to_rank0        replicated, partial     nothing
==================== ======================= ==============================================

A *shared* tensor is replicated, and each rank uses it for its own part of the work: gradients arrive partial.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..compat.distributed import resolve_process_group
from ..placement import PARTIAL, REPLICATE, Layout, Partial, Placement, Replicate, Shard
from . import collectives
from .redistribute import (
    _Gather,
    _MaskToRank0,
    _Reduce,
    _ReduceCoalesced,
    _ReduceScatter,
    _Share,
    _Slice,
    _Unshare,
    slice_box,
)

_library = torch.library.Library("paraxis", "FRAGMENT")


# -- placements as text --------------------------------------------------------------------------------------------


@functools.cache
def encode(placement: Placement) -> str:
    """A placement as text: ``shard(1: 0-64|64-128 of 128)``, the index ranges of every rank within a period."""
    if isinstance(placement, Replicate):
        return "replicate"
    if isinstance(placement, Partial):
        return "partial"
    dims = []
    for dim, layout in placement.layouts:
        ranks = "|".join(",".join(f"{a}-{b}" for a, b in ranges) for ranges in layout.ranges)
        dims.append(f"{dim}: {ranks} of {layout.period}")
    return f"shard({'; '.join(dims)})"


@functools.cache
def decode(text: str) -> Placement:
    """The inverse of :func:`encode`."""
    if text in ("replicate", "partial"):
        return REPLICATE if text == "replicate" else PARTIAL
    layouts: dict[int, Layout] = {}
    for item in filter(None, text.removeprefix("shard(").removesuffix(")").split("; ")):
        dim, _, rest = item.partition(": ")
        ranks, _, period = rest.partition(" of ")
        ranges = tuple(tuple(_range(r) for r in rank.split(",") if r) for rank in ranks.split("|"))
        layouts[int(dim)] = Layout(int(period), ranges)
    return Shard.of(layouts)


def _range(text: str) -> tuple[int, int]:
    start, _, stop = text.partition("-")
    return int(start), int(stop)


def _shard(text: str) -> Shard:
    placement = decode(text)
    assert isinstance(placement, Shard)
    return placement


# -- the operators -------------------------------------------------------------------------------------------------


def _differentiates(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    ranks: dist.ProcessGroup = resolve_process_group(group)
    if not _differentiates(x):
        return collectives.all_reduce(x, ranks, op)  # type: ignore[arg-type]
    assert op == "sum", f"all_reduce with {op!r} is not differentiable"
    return _Reduce.apply(x, ranks)  # type: ignore[no-any-return]


def _all_reduce_coalesced(xs: Sequence[torch.Tensor], op: str, group: str) -> list[torch.Tensor]:
    if any(map(_differentiates, xs)):
        assert op == "sum", f"all_reduce with {op!r} is not differentiable"
        return list(_ReduceCoalesced.apply(resolve_process_group(group), *xs))
    flat = _all_reduce(torch.cat([x.reshape(-1) for x in xs]), op, group)
    return [piece.view(x.shape) for piece, x in zip(flat.split([x.numel() for x in xs]), xs, strict=True)]


def _all_gather(x: torch.Tensor, source: str, shape: Sequence[int], group: str) -> torch.Tensor:
    """``shape`` is the global one; sizes of -1 follow from the tensor's."""
    ranks: dist.ProcessGroup = resolve_process_group(group)
    placement = _shard(source)
    full = [x.shape[d] if n == -1 else n for d, n in enumerate(shape)]
    for d, layout in placement.layouts:
        if shape[d] == -1:
            full[d] = x.shape[d] * layout.period // layout.local_size(layout.period, ranks.rank())
    return _Gather.apply(x, placement, full, ranks)  # type: ignore[no-any-return]


def _reduce_scatter(x: torch.Tensor, target: str, group: str) -> torch.Tensor:
    return _ReduceScatter.apply(x, _shard(target), resolve_process_group(group))  # type: ignore[no-any-return]


def _take_shard(x: torch.Tensor, target: str, shared: bool, group: str) -> torch.Tensor:
    ranks: dist.ProcessGroup = resolve_process_group(group)
    if shared:
        return slice_box(x, _shard(target), ranks.rank())
    return _Slice.apply(x, _shard(target), ranks)  # type: ignore[no-any-return]


def _share(x: torch.Tensor, group: str) -> torch.Tensor:
    return _Share.apply(x, resolve_process_group(group))  # type: ignore[no-any-return]


def _unshare(x: torch.Tensor, group: str) -> torch.Tensor:
    return _Unshare.apply(x, resolve_process_group(group))  # type: ignore[no-any-return]


def _mask_to_rank0(x: torch.Tensor, group: str) -> torch.Tensor:
    return _MaskToRank0.apply(x, resolve_process_group(group))  # type: ignore[no-any-return]


_SCHEMAS = {
    "all_reduce(Tensor x, str op, str group) -> Tensor": _all_reduce,
    "all_reduce_coalesced(Tensor[] xs, str op, str group) -> Tensor[]": _all_reduce_coalesced,
    "all_gather(Tensor x, str source, SymInt[] shape, str group) -> Tensor": _all_gather,
    "reduce_scatter(Tensor x, str target, str group) -> Tensor": _reduce_scatter,
    "take_shard(Tensor x, str target, bool shared, str group) -> Tensor": _take_shard,
    "share(Tensor x, str group) -> Tensor": _share,
    "unshare(Tensor x, str group) -> Tensor": _unshare,
    "mask_to_rank0(Tensor x, str group) -> Tensor": _mask_to_rank0,
}
for _schema, _function in _SCHEMAS.items():
    _library.define(_schema)
    # Composite: autograd and compilers see through it to the operators it is made of.
    _library.impl(_schema.partition("(")[0], _function, "CompositeImplicitAutograd")

all_reduce = torch.ops.paraxis.all_reduce.default
all_reduce_coalesced = torch.ops.paraxis.all_reduce_coalesced.default
all_gather = torch.ops.paraxis.all_gather.default
reduce_scatter = torch.ops.paraxis.reduce_scatter.default
take_shard = torch.ops.paraxis.take_shard.default
share = torch.ops.paraxis.share.default
unshare = torch.ops.paraxis.unshare.default
mask_to_rank0 = torch.ops.paraxis.mask_to_rank0.default

COLLECTIVES = {
    all_reduce: "all_reduce",
    all_reduce_coalesced: "all_reduce",
    all_gather: "all_gather",
    reduce_scatter: "reduce_scatter",
}
"""The operators that communicate in the forward pass, and the kind of collective each is."""

REDISTRIBUTIONS = frozenset({*COLLECTIVES, take_shard, share, unshare, mask_to_rank0})
"""All operators here. On a single rank each returns its input."""


def redistribution(
    source: Placement, target: Placement, shape: Sequence[int | None], group: str
) -> tuple[Any, tuple[Any, ...]]:
    """The operator from one placement to another, and its arguments after the tensor.

    ``shape`` is the global one, with None for dynamic sizes. The placements must be one operator apart: what is
    further (sharded to sharded) goes through replicated.
    """
    if isinstance(source, Partial):
        if isinstance(target, Shard) and target.layouts:
            return reduce_scatter, (encode(target), group)
        if isinstance(target, Replicate):
            return all_reduce, ("sum", group)
    elif isinstance(source, Shard) and source.layouts:
        if isinstance(target, Replicate):
            dims = source.dims  # sizes of the others may be dynamic
            full = [n if n is not None and d in dims else -1 for d, n in enumerate(shape)]
            return all_gather, (encode(source), full, group)
    elif isinstance(target, Shard) and target.layouts:
        return take_shard, (encode(target), isinstance(source, Shard), group)
    elif isinstance(source, Replicate):
        return (mask_to_rank0 if isinstance(target, Partial) else share), (group,)
    elif isinstance(target, Replicate):
        return unshare, (group,)
    raise ValueError(f"no single redistribution leads from {source} to {target}")
