"""Losses on sharded logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..placement import REPLICATE, Shard
from .base import Call, InputPlacement, Strategy, register

aten = torch.ops.aten


@register(aten.cross_entropy_loss.default, samples="loss")
def cross_entropy(call: Call, given: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Classes split over the ranks: the replace pass puts the vocabulary-parallel loss here.

    For targets that are indices; class weights are whole.
    """
    placement, logits = given[0], call.inputs[0]
    classes = 0 if logits.ndim == 1 else 1
    indices = not call.inputs[1].dtype.is_floating_point
    if isinstance(placement, Shard) and list(placement.dims) == [classes] and indices:
        if placement.dims[classes].contiguous(logits.shape[classes]):
            others = (REPLICATE,) * (len(call.inputs) - 1)
            yield Strategy((placement, *others), (REPLICATE,), kind="vocab")
