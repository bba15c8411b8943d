"""Losses on sharded logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..placement import REPLICATE, Shard
from .base import Call, InputPlacement, Strategy
from .registry import builtin_rule

aten = torch.ops.aten


@builtin_rule(aten.cross_entropy_loss.default, samples="loss")
def cross_entropy(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Classes sharded contiguously: the replace pass puts the vocabulary-parallel loss here.

    Only for targets that are indices; class weights are replicated.
    """
    placement, logits = placements[0], call.inputs[0]
    classes = 0 if logits.ndim == 1 else 1
    indices = not call.inputs[1].dtype.is_floating_point
    if isinstance(placement, Shard) and list(placement.dims) == [classes] and indices:
        if placement.dims[classes].contiguous(logits.shape[classes]):
            others = (REPLICATE,) * (len(call.inputs) - 1)
            yield Strategy((placement, *others), (REPLICATE,), kind="vocab")
