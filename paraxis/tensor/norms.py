"""Norms of sharded tensors outside of graphs: every element counts once, and no tensor is gathered.

``clip_grad_norm_`` asks for the norms of all gradients at once. Every rank sums over its own shards, an element that
lives on ``n`` ranks weighted by ``1/n``, and two all-reduces complete all sums: one over the data-parallel ranks, for
parameters that these shard, and one over the tensor-parallel ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..compat.torch import schema_of
from ..distributed.collectives import all_reduce
from ..distributed.redistribute import copies_of
from ..placement import Shard
from .sharded_tensor import ShardedTensor

aten = torch.ops.aten
NORMS = (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar)


def norms(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a norm over all elements, or of several; NotImplemented for anything else."""
    if func not in NORMS:
        return NotImplemented
    arguments = {a.name: v for a, v in zip(schema_of(func).arguments, args, strict=False)} | dict(kwargs)
    order = arguments.get("ord", 2)
    tensors = arguments["self"] if func is aten._foreach_norm.Scalar else [arguments["self"]]
    plain = arguments.get("dim") is None and not arguments.get("keepdim", False)
    if not plain or not all(x.is_floating_point() and not isinstance(x, DTensor) for x in tensors):
        return NotImplemented
    found = _norms(tensors, float(order), arguments.get("dtype"))
    return found if func is aten._foreach_norm.Scalar else found[0]


def _norms(tensors: list[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    infinity = math.isinf(order)
    sums = [_local_term(x, order) for x in tensors]
    for groups in ([_dp_group(x) for x in tensors], [_tp_group(x) for x in tensors]):
        for group in dict.fromkeys(g for g in groups if g is not None):
            which = [i for i, g in enumerate(groups) if g is group]
            op: Any = "sum" if not infinity else "max" if order > 0 else "min"
            for i, total in zip(which, all_reduce(torch.stack([sums[i] for i in which]), group, op), strict=True):
                sums[i] = total
    roots = [x if infinity or order == 0 else x ** (1 / order) for x in sums]
    return [x.to(dtype or t.dtype) for x, t in zip(roots, tensors, strict=True)]


def _dp_group(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The data-parallel ranks that a tensor is sharded over; None if it is not."""
    dp_shard = tensor.dp_shard if isinstance(tensor, ShardedTensor) else None
    return dp_shard.group if dp_shard is not None else None


def _tp_group(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The tensor-parallel ranks that a tensor is sharded over; None if it is not."""
    placement = tensor.placement if isinstance(tensor, ShardedTensor) else None
    return tensor._spec.group if isinstance(placement, Shard) and placement.layouts else None  # type: ignore[attr-defined]


def _local_term(tensor: torch.Tensor, order: float) -> torch.Tensor:
    """This rank's term of the sum of powers (or the largest or smallest magnitude), in at least float32."""
    local = tensor._local.detach() if isinstance(tensor, ShardedTensor) else tensor.detach()
    wide = torch.float64 if local.dtype == torch.float64 else torch.float32
    if math.isinf(order):
        if not local.numel():
            return torch.tensor(0.0 if order > 0 else math.inf, dtype=wide, device=local.device)
        magnitudes = local.abs()
        return (magnitudes.max() if order > 0 else magnitudes.min()).to(wide)
    copies = None
    if isinstance(tensor, ShardedTensor):
        copies = copies_of(tensor.placement, tensor.shape, dist.get_rank(tensor._spec.group), local.device)
        if copies is not None and tensor.dp_shard is not None:
            copies = tensor.dp_shard.reshard(copies)
    if copies is None:
        norm = torch.linalg.vector_norm(local, order, dtype=wide)
        return norm if order == 0 else norm**order
    powers = (local != 0).to(wide) if order == 0 else local.to(wide).abs() ** order
    return (powers / copies).sum()
