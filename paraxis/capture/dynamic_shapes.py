"""Telling the compiler what will grow: the cache of a decoding model, and all that is as long as it.

Left to itself it compiles the first decoding step for the length that the cache has then, finds the next step
different, and compiles a second time for all lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo as dynamo
from torch.utils import _pytree as pytree


def mark_dynamic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark the length of the caches among the arguments, and sizes that go with it, as one that may change.

    They are hints: where the model computes with the number itself, the compiler still takes it as it is.
    """
    lengths: set[int] = set()
    for states in _growing_states((*args, *kwargs.values())):
        if states.dim() == 4 and states.shape[-2] > 1:
            lengths.add(states.shape[-2])
            dynamo.maybe_mark_dynamic(states, states.dim() - 2)
    if not lengths:
        return
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    steps = {x.shape[1] for x in tensors if x.dim() >= 2}
    longer = lengths | {length + step for length in lengths for step in steps}
    for tensor in tensors:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] in longer:
                dynamo.maybe_mark_dynamic(tensor, dim)


def mark_static(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep the sizes of the arguments as they are, a graph for each: a length that may be any cannot be split.

    Not beside a cache that grows: single tokens are not split anyhow.
    """
    if next(_growing_states((*args, *kwargs.values())), None) is None:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                dynamo.mark_static(tensor)


def _growing_states(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Keys and values in transformers' caches, of layers whose cache has no fixed size."""
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
