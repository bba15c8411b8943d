"""Operators that make tensors from nothing: every rank makes the same one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..capture.mark_output import mark_output_op
from .base import Call, InputPlacement, Strategy, register

aten = torch.ops.aten


@register(
    aten.arange,
    aten.full,
    aten.zeros,
    aten.ones,
    aten.empty,
    aten.empty_strided,
    aten.empty_permuted,
    aten.randperm,
    aten.scalar_tensor,
    aten.rand,
    aten.randn,
    aten.eye,
    aten.linspace,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.new_empty,
    aten.tril_indices,
    aten.triu_indices,
    mark_output_op,
    samples="factory",
)
def whole(call: Call, given: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Nothing beyond the replicated strategy. For the results the caller reads, that is their meaning."""
    return ()
