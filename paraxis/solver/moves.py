"""Moving tensors between placements: what stays afterwards, and sequence-parallel activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..placement import REPLICATE, SHARED, Layout, Partial, Placement, Replicate, Shard
from ..rules import Call, Strategy
from ..rules.base import is_one
from .program import Program


def share(call: Call, strategy: Strategy) -> Strategy:
    """Mark replicated inputs as shared where the result is sharded: each rank uses them for its own part."""
    if not strategy.is_sharded or not any(isinstance(p, Replicate) for p in strategy.inputs):
        return strategy
    inputs = tuple(
        SHARED if isinstance(p, Replicate) and (t.dtype.is_floating_point or t.dtype.is_complex) else p
        for t, p in zip(call.inputs, strategy.inputs, strict=True)
    )
    return Strategy(inputs, strategy.outputs, strategy.localize, strategy.kind)


def sequence_shards(shape: Sequence[Any], length: int | None, world: int) -> list[Placement]:
    """The placements of an activation that is sharded on the sequence of ``length``; empty if it cannot be.

    The activation is [..., sequence, features], or [batch * sequence, features], of which every rank then holds its
    part of each sequence.
    """
    if length is None or length < world or len(shape) < 2 or not isinstance(shape[-2], int) or is_one(shape[-1]):
        return []  # the statistics of a norm are small: all-reduce them
    if shape[-2] != length and (len(shape) > 2 or shape[-2] % length):
        return []
    return [Shard.of(len(shape) - 2, Layout.even(length, world))]


def sequence_length(program: Program) -> int | None:
    """The most common sequence length of activations [batch, sequence, features]; None if there is none."""
    lengths: Counter[int] = Counter()
    for step in program.steps:
        for tensor in step.call.outputs if step.call is not None else ():
            if tensor.ndim == 3 and tensor.dtype.is_floating_point and isinstance(tensor.shape[1], int):
                lengths[tensor.shape[1]] += 1
    return lengths.most_common(1)[0][0] if lengths else None


def settled(now: Placement, need: Placement) -> Placement:
    """The placement of a tensor for later uses, after it was moved from ``now`` to ``need``: the most useful one."""
    if now == need or isinstance(now, Replicate):
        return now
    if isinstance(now, Shard) and not now.layouts:
        return now
    if isinstance(now, Partial) and isinstance(need, Shard) and need.layouts:
        return need
    return REPLICATE  # one shard becomes another by way of the full tensor, which later uses can take
