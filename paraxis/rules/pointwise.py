"""Pointwise operators, with broadcasting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..compat.torch import OpOverload, OpOverloadPacket, schema_of
from ..placement import PARTIAL, REPLICATE, Placement, Shard
from .base import Call, InputPlacement, Strategy, Tensor, draws, is_one, is_partial, same_size
from .registry import builtin_rule

aten = torch.ops.aten


def _pointwise_ops() -> list[Any]:
    """Every functional ATen operator that torch tags as pointwise."""
    found = []
    for name in dir(aten):
        packet = getattr(aten, name)
        if not isinstance(packet, OpOverloadPacket):
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if torch.Tag.pointwise in op.tags and not schema_of(op).is_mutable:
                found.append(op)
    return found


_UNTAGGED = [
    aten.leaky_relu.default,  # not every version of torch tags it
    aten.to,
    aten._to_copy,
    aten.type_as,
    aten.contiguous,
    aten.clone,
    aten.copy.default,
    aten.alias,
    aten.detach,
    aten.lift_fresh_copy,
    aten.dropout,
    aten.feature_dropout,
    aten.native_dropout,
    aten.masked_fill,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.polar.default,
    aten.real.default,
    aten.imag.default,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.empty_like,
    aten.rand_like,
    aten.randn_like,
    aten.bernoulli.default,
    aten.bernoulli.p,
]

_LINEAR = {"to", "_to_copy", "contiguous", "clone", "alias", "detach", "lift_fresh_copy", "neg", "type_as"}
"""Linear operators of one tensor: partial inputs give partial results."""


@builtin_rule(*_pointwise_ops(), *_UNTAGGED, samples="pointwise", free=True)
def pointwise(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Follow each sharded input; the others get the same placement, without the dimensions they broadcast."""
    ndim = call.out.ndim
    random = draws(call)
    features = random and call.op_name == "feature_dropout"  # drops entire (batch, feature) planes
    seen: set[Placement] = set()
    for tensor, placement in zip(call.inputs, placements, strict=True):
        if not isinstance(placement, Shard):
            continue
        lift = ndim - tensor.ndim
        if lift < 0:  # only its dtype is used
            continue
        out = Shard.of({d + lift: x for d, x in placement.layouts})
        if out in seen or not all(same_size(call.out.shape[d], tensor.shape[d - lift]) for d in out.dims):
            continue
        if random and (out.has_copies or (features and any(d > 1 for d in out.dims))):
            continue
        seen.add(out)
        yield Strategy(tuple(restrict(out, t, ndim) for t in call.inputs), (out,) * len(call.outputs))
    yield from _partial(call, placements)


def restrict(out: Shard, tensor: Tensor, ndim: int) -> Placement:
    """The placement of an input, from that of the output: without the dimensions that the input broadcasts."""
    lift = ndim - tensor.ndim
    box = Shard.of({d - lift: x for d, x in out.layouts if d >= lift and not is_one(tensor.shape[d - lift])})
    return box if box.layouts or not out.layouts else REPLICATE


def _partial(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Linear operators take partial inputs."""
    if not any(is_partial(p) for p in placements) or not isinstance(call.target, OpOverload):
        return
    name = call.op_name
    if name in ("add", "sub") and len(call.inputs) == 2:
        yield Strategy((PARTIAL, PARTIAL), (PARTIAL,))
    elif (name in _LINEAR and len(call.inputs) == 1 and _keeps_precision(call)) or (
        name in ("mul", "div") and len(call.inputs) == 1 and not call.kwargs.get("rounding_mode")
    ):
        yield Strategy((PARTIAL,), (PARTIAL,))
    elif name in ("mul", "div") and len(call.inputs) == 2 and not call.kwargs.get("rounding_mode"):
        if is_partial(placements[0]):
            yield Strategy((PARTIAL, REPLICATE), (PARTIAL,))
        if is_partial(placements[1]) and name == "mul":
            yield Strategy((REPLICATE, PARTIAL), (PARTIAL,))


def _keeps_precision(call: Call) -> bool:
    """Partial values must not be rounded before they are summed."""
    source, result = call.inputs[0].dtype, call.out.dtype
    return source.is_floating_point and result.is_floating_point and result.itemsize >= source.itemsize
