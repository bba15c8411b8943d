"""Marking dimensions as dynamic for the compiler: the length of a growing KV cache, and sizes that follow from it.

Otherwise Dynamo specializes the first decode step on the current length of the cache, recompiles at the second step,
and only then makes the dimension dynamic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..compat.dynamo import mark_maybe_dynamic, specialize
from ..compat.torch import pytree


def mark_dynamic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark the length of the KV caches among the arguments, and sizes that follow from it, as dynamic.

    These are hints: where the model computes with the number, the compiler still specializes on it.
    """
    lengths: set[int] = set()
    for states in _growing_states((*args, *kwargs.values())):
        if states.dim() == 4 and states.shape[-2] > 1:
            lengths.add(states.shape[-2])
            mark_maybe_dynamic(states, states.dim() - 2)
    if not lengths:
        return
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    steps = {x.shape[1] for x in tensors if x.dim() >= 2}
    lengths |= {length + step for length in lengths for step in steps}
    for tensor in tensors:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] in lengths:
                mark_maybe_dynamic(tensor, dim)


def mark_static(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Specialize on the sizes of the arguments, one graph for each: a dynamic length cannot be sharded.

    Not beside a growing KV cache: the single token of a decode step is not sharded anyway.
    """
    if next(_growing_states((*args, *kwargs.values())), None) is None:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                specialize(tensor)


def _growing_states(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Keys and values in transformers' KV caches, of layers whose cache is not preallocated."""
    for value in values:
        if hasattr(value, "self_attention_cache"):
            value = value.self_attention_cache
        for layer in getattr(value, "layers", None) or ():
            if getattr(layer, "is_compileable", True):
                continue
            for name in ("keys", "values"):
                states = getattr(layer, name, None)
                if isinstance(states, torch.Tensor):
                    yield states
