"""Where tensors go: what is left of a placement after a move, and how activations are split on the sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..placement import REPLICATE, SHARED, Layout, Partial, Placement, Replicate, Shard
from ..rules import Call, Strategy
from ..rules.base import is_one
from .program import Program


def share(call: Call, strategy: Strategy) -> Strategy:
    """Where the result is not replicated, a replicated input is used by each rank for its own part."""
    if not strategy.is_sharded or not any(isinstance(p, Replicate) for p in strategy.inputs):
        return strategy
    inputs = tuple(
        SHARED if isinstance(p, Replicate) and (t.dtype.is_floating_point or t.dtype.is_complex) else p
        for t, p in zip(call.inputs, strategy.inputs, strict=True)
    )
    return Strategy(inputs, strategy.outputs, strategy.localize, strategy.kind)


def sequence_shards(shape: Sequence[Any], length: int | None, world: int) -> list[Placement]:
    """How an activation between parallel layers is split on the sequence of ``length``, if it can be.

    It is [..., sequence, features], or [batch * sequence, features], of which every rank then has its part of each
    sequence.
    """
    if length is None or length < world or len(shape) < 2 or not isinstance(shape[-2], int) or is_one(shape[-1]):
        return []  # a statistic of a norm is as well summed
    if shape[-2] != length and (len(shape) > 2 or shape[-2] % length):
        return []
    return [Shard.of(len(shape) - 2, Layout.even(length, world))]


def sequence_length(program: Program) -> int | None:
    """The length that most activations [batch, sequence, features] of a program have; None if it may be any."""
    lengths: Counter[int] = Counter()
    for step in program.steps:
        for tensor in step.call.outputs if step.call is not None else ():
            if tensor.ndim == 3 and tensor.dtype.is_floating_point and isinstance(tensor.shape[1], int):
                lengths[tensor.shape[1]] += 1
    return lengths.most_common(1)[0][0] if lengths else None


def settled(given: Placement, need: Placement) -> Placement:
    """Where a tensor is after it was brought from ``given`` to ``need``: the most useful version at hand."""
    if given == need or isinstance(given, Replicate):
        return given
    if isinstance(given, Shard) and not given.layouts:
        return given
    if isinstance(given, Partial) and isinstance(need, Shard) and need.layouts:
        return need
    return REPLICATE  # one shard becomes another by way of the whole, which stays at hand
