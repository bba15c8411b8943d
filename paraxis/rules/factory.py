"""Operators that create tensors: every rank creates the same one."""

from __future__ import annotations

import torch

from .registry import register_replicated

aten = torch.ops.aten

register_replicated(
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
    samples="factory",
)
