"""Operators along some dimensions: reductions, and softmaxes, sorts and scans, which preserve the shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from ..placement import PARTIAL, Shard
from .base import Call, InputPlacement, LocalCall, Strategy, is_partial, normalize_dim
from .registry import builtin_rule

aten = torch.ops.aten


def _dims(call: Call, position: int = 1) -> set[int]:
    """The dimensions that a call works along."""
    n = call.inputs[0].ndim
    dims = call.arg(position, "dim")
    if dims is None or dims == [] or isinstance(dims, bool):  # var(x, unbiased) has no dimensions there
        return set(range(n))
    return {normalize_dim(d, n) for d in ([dims] if isinstance(dims, int) else dims)}


def _reduced(placement: Shard, gone: set[int], keepdim: bool) -> Shard:
    """The placement after the dimensions ``gone`` were reduced."""
    remaining = {d: x for d, x in placement.layouts if d not in gone}
    return Shard.of(remaining if keepdim else {d - sum(g < d for g in gone): x for d, x in remaining.items()})


def _keepdim(call: Call) -> bool:
    return call.out.ndim == call.inputs[0].ndim


@builtin_rule(aten.sum, aten.mean, samples="reduction")
def linear_reduction(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Over sharded dimensions the results are partial: only the small result is communicated."""
    (placement,) = placements
    gone = _dims(call)
    if is_partial(placement):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if not isinstance(placement, Shard):
        return
    inside = gone & set(placement.dims)
    if not inside:
        yield Strategy((placement,), (_reduced(placement, gone, _keepdim(call)),) * len(call.outputs))
    elif inside == set(placement.dims) and not placement.has_copies:
        count = prod(call.inputs[0].shape[d] for d in gone)
        if isinstance(count, int):
            local = partial(_local_mean, count=count) if call.op_name == "mean" else None
            yield Strategy((placement,), (PARTIAL,), localize=local)


def _mean_term(x: torch.Tensor, dims: Any = None, keepdim: bool = False, *, count: int, dtype: Any = None) -> Any:
    """This rank's term of a mean over ``count`` elements, of which it holds some."""
    return torch.sum(x, dims, keepdim, dtype=dtype) / count if dims is not None else torch.sum(x, dtype=dtype) / count


def _local_mean(target: Any, args: list[Any], kwargs: dict[str, Any], rank: int, count: int) -> LocalCall:
    return _mean_term, args, {**kwargs, "count": count}


@builtin_rule(
    aten.amax,
    aten.amin,
    aten.any,
    aten.all,
    aten.argmax,
    aten.argmin,
    aten.max.dim,
    aten.min.dim,
    aten.prod,
    aten.var,
    aten.std,
    aten.var_mean,
    aten.std_mean,
    aten.median.dim,
    aten.logsumexp,
    aten.linalg_vector_norm.default,
    aten.norm.ScalarOpt_dim,
    samples="reduction",
)
def other_reduction(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Reductions over dimensions that are not sharded."""
    (placement,) = placements
    name = call.op_name
    gone = _dims(call, 2 if name in ("linalg_vector_norm", "norm") else 1)
    if isinstance(placement, Shard) and not gone & set(placement.dims):
        yield Strategy((placement,), (_reduced(placement, gone, _keepdim(call)),) * len(call.outputs))


@builtin_rule(
    aten.softmax.int,
    aten._softmax.default,
    aten.log_softmax.int,
    aten._log_softmax.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
    aten.flip.default,
    aten.roll.default,
    samples="line",
)
def along(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Shape-preserving operators along some dimensions; the others may be sharded."""
    placement = placements[0]
    name = call.op_name
    dims = _dims(call, 2 if name == "roll" else 1)
    if is_partial(placement) and name in ("cumsum", "flip", "roll"):
        yield Strategy((PARTIAL,), (PARTIAL,))
    if isinstance(placement, Shard) and not dims & set(placement.dims):
        yield Strategy((placement,), (placement,) * len(call.outputs))


@builtin_rule(aten.topk.default, aten.kthvalue.default, aten.sort, samples="line")
def order(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Sorting along a dimension that is not sharded."""
    (placement,) = placements
    name, n = call.op_name, call.inputs[0].ndim
    if call.target is aten.sort.stable:
        dim = call.kwargs.get("dim", -1)
    else:
        dim = call.arg(2 if name in ("topk", "kthvalue") else 1, "dim", -1)
    dim = normalize_dim(dim, n)
    if isinstance(placement, Shard) and dim not in placement.dims:
        out = placement if _keepdim(call) else _reduced(placement, {dim}, False)
        yield Strategy((placement,), (out,) * len(call.outputs))


@builtin_rule(aten.glu.default, samples="line")
def glu(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """One half times the sigmoid of the other: along that dimension both halves need the same layout."""
    (placement,) = placements
    dim = normalize_dim(call.arg(1, "dim", -1), call.inputs[0].ndim)
    if isinstance(placement, Shard):
        layout, half = placement.dims.get(dim), call.out.shape[dim]
        if layout is None or (isinstance(half, int) and layout.fits(half)):
            yield Strategy((placement,), (placement,))
