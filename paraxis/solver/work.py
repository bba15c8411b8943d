"""How much matmul work an operator is, and which fraction of it a rank does: what tensor parallelism is for."""

from __future__ import annotations

from math import prod

import torch

from ..placement import Partial, Replicate
from ..rules import Call, Strategy, Tensor
from .cost import CONTRACTING, CostModel, numel
from .program import hint

aten = torch.ops.aten
_ATTENTION = (
    "scaled_dot_product_attention",
    "paraxis::packed_attention",
    "paraxis::paged_attention",
    "flex_attention",
)
_GROUPED = ("_grouped_mm", "transformers::grouped_mm_fallback")


def matmul_flops(call: Call) -> int:
    """FLOPs of a full matmul, convolution or attention; 0 for any other operator. Symbolic sizes count with their
    hints."""
    if call.target in CONTRACTING:
        return 2 * numel(call.out) * hint(call.inputs[CONTRACTING[call.target]].shape[-1])
    if call.op_name in _GROUPED:
        return 2 * numel(call.out) * hint(call.inputs[0].shape[-1])
    if call.target is aten.convolution.default:
        moved = call.inputs[0] if bool(call.arg(6, "transposed", False)) else call.out
        return 2 * numel(moved) * _numel_after_first(call.inputs[1])
    if call.op_name in _ATTENTION or type(call.target).__name__ == "FlexAttention":
        query, key, value = call.inputs[:3]
        scores = numel(query) // max(hint(query.shape[-1]), 1) * hint(key.shape[-2])
        return 2 * scores * (hint(query.shape[-1]) + hint(value.shape[-1]))
    return 0


def local_fraction(strategy: Strategy, model: CostModel) -> float:
    """The largest fraction of an operator's work that one rank does."""
    out = strategy.outputs[0]
    if isinstance(out, Partial):  # each rank has a part of the inner dimension
        return min((model.fraction(p) for p in strategy.inputs if not isinstance(p, (Partial, Replicate))), default=1.0)
    return model.fraction(out)


def _numel_after_first(tensor: Tensor) -> int:
    return prod((hint(n) for n in tensor.shape[1:]), start=1)
