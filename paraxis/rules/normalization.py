"""Normalizations over the last dimensions, as whole operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..placement import REPLICATE, Shard
from .base import Call, Given, Strategy, register

aten = torch.ops.aten


@register(aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default, free=True)
def norm(call: Call, given: Sequence[Given]) -> Iterable[Strategy]:
    """Every row by itself: the leading dimensions may be sharded, weight and bias are whole."""
    placement = given[0]
    first = call.inputs[0].ndim - len(call.args[1])
    if isinstance(placement, Shard) and all(d < first for d in placement.dims):
        others = (REPLICATE,) * (len(call.inputs) - 1)
        yield Strategy((placement, *others), (placement,) * len(call.outputs))
