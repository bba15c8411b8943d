"""Operators on sharded results outside of graphs, by the same rules that graphs are planned with.

Beam search selects rows of a KV cache, and a conversation crops it: an operator along dimensions that are not sharded
runs on every shard independently. So caches stay sharded instead of being gathered. Parameters, and tensors that
require gradients, are excluded: what users compute from those they expect as full tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..compat.torch import pytree, schema_of
from ..placement import Replicate, Shard
from ..rules import Call, InputPlacement, Tensor, rule_for
from .sharded_tensor import ShardedTensor, ShardSpec


def dispatch_by_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """The sharded result, if a rule says that the operator runs on these shards unchanged; else NotImplemented."""
    rule = rule_for(func)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    sharded = [x for x in tensors if isinstance(x, ShardedTensor)]
    if rule is None or schema_of(func).is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return NotImplemented
    if any(x.requires_grad or getattr(x._spec, "name", None) for x in sharded):
        return NotImplemented
    if any(x._spec.group is not sharded[0]._spec.group or x.dp_shard is not None for x in sharded):
        return NotImplemented
    group = sharded[0]._spec.group
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    call = _call(func, args, kwargs, world)
    if call is None:
        return NotImplemented
    inputs: list[InputPlacement] = [x.placement if isinstance(x, ShardedTensor) else Replicate() for x in tensors]
    for strategy in rule(call, inputs):
        same = all(need == have for need, have in zip(strategy.inputs, inputs, strict=True))
        if same and all(isinstance(p, Shard) and p.layouts for p in strategy.outputs) and _fits(call, strategy.outputs):
            local_args, local_kwargs = pytree.tree_map(_local, (list(args), dict(kwargs)))
            target = torch.ops.aten.reshape.default if func is torch.ops.aten.view.default else func
            if strategy.localize is not None:
                target, local_args, local_kwargs = strategy.localize(target, local_args, local_kwargs, rank)
            result = target(*local_args, **local_kwargs)
            outputs = iter(zip(strategy.outputs, call.outputs, strict=True))

            def wrap(x: Any, outputs: Any = outputs) -> Any:
                if not isinstance(x, torch.Tensor):
                    return x
                placement, described = next(outputs)
                return ShardedTensor(x, ShardSpec(placement, group), described.shape)

            return pytree.tree_map(wrap, result)
    return NotImplemented


def _local(x: Any) -> Any:
    return x._local if isinstance(x, ShardedTensor) else x


def _fits(call: Call, outputs: Any) -> bool:
    pairs = zip(call.outputs, outputs, strict=True)
    return all(layout.fits(tensor.shape[d]) for tensor, p in pairs for d, layout in p.layouts)


def _call(func: Any, args: Any, kwargs: Any, world: int) -> Call | None:
    """The call with global shapes; None if its result depends on data."""
    inputs: list[Tensor] = []

    def abstract(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        inputs.append(Tensor(len(inputs), tuple(x.shape), x.dtype))
        return inputs[-1]

    def empty(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x

    shown_args, shown_kwargs = pytree.tree_map(abstract, (tuple(args), kwargs))
    try:
        results = func(*pytree.tree_map(empty, tuple(args)), **pytree.tree_map(empty, kwargs))
    except (RuntimeError, NotImplementedError):
        return None
    found = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
    outputs = tuple(Tensor(i, tuple(x.shape), x.dtype) for i, x in enumerate(found))
    return Call(func, shown_args, shown_kwargs, tuple(inputs), outputs, world=world)
