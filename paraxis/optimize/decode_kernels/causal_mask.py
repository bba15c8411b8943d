"""Masks of a decode step that hide the keys after a position.

What comes after the position in a preallocated KV cache is not read at all then, and programs get equal parts of the
keys up to there. If the mask hides nothing else, they need no mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...graph.match import NODE, AnyOf, Capture, Op, Via, Where, match
from ..patterns import dtype_of, is_call, range_of, tensor_of
from .scalars import aliases_of_input, is_written

aten = torch.ops.aten

_SAME_ELEMENTS = (
    aten.unsqueeze.default,
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
    aten.alias.default,
)
_CONVERSIONS = (aten.to.dtype_layout, aten.to.dtype, aten.to.device, aten.to.other)


def _bare(node: Any) -> Any:
    """The integers before dimensions were added or expanded, zero was added, or they were converted to int64."""
    while isinstance(node, Node):
        is_zero_added = is_call(node, aten.add.Tensor) and node.args[1:] == (0,) and not node.kwargs
        is_converted = is_call(node, *_CONVERSIONS) and dtype_of(node) == torch.int64 == dtype_of(node.args[0])
        if not (is_call(node, *_SAME_ELEMENTS) or is_zero_added or is_converted):
            break
        node = node.args[0]
    return node


_POSITION = AnyOf(
    Via(_bare, Op(aten.add.Tensor, Via(_bare, range_of(1)), Via(_bare, Capture("position", NODE)), commutes=True)),
    Via(_bare, Capture("position", NODE)),
)
"""A position, perhaps as ``arange(1) + position``."""


def _last_visible(keys: int) -> AnyOf:
    """The pattern of ``arange(keys) <= position``."""
    everything = Via(_bare, range_of(keys))
    return AnyOf(
        Op(aten.le.Tensor, everything, _POSITION),
        Op(aten.ge.Tensor, _POSITION, everything),
    )


def hides_later_keys(mask: Any, position: Any, keys: int) -> bool:
    """Whether a mask over so many keys shows none after ``position``: it may hide others (padding) as well.

    Args:
        mask: A mask of one query.
        position: Where the step writes into the KV cache.
    """
    if dtype_of(mask) != torch.bool or not _is_range_of_last_dim(mask, keys):
        return False
    terms = _bare(mask)
    if is_call(terms, aten.bitwise_and.Tensor, aten.logical_and.default, aten.__and__.Tensor):
        return any(hides_later_keys(term, position, keys) for term in terms.args)
    return hides_just_later_keys(mask, position, keys)


def hides_just_later_keys(mask: Any, position: Any, keys: int) -> bool:
    """Whether a mask over so many keys shows those up to ``position``, and no other.

    Args:
        mask: A mask of one query.
        position: Where the step writes into the KV cache.
    """
    if dtype_of(mask) != torch.bool or not _is_range_of_last_dim(mask, keys):
        return False
    found = match(Via(_bare, _last_visible(keys)), mask)
    here = match(Where(lambda node: isinstance(node, Node), _POSITION), position)
    if found is None or here is None:
        return False
    value = tensor_of(found["position"])
    if value is None or value.numel() != 1 or value.dtype != torch.int64:
        return False
    if found["position"] is not here["position"]:
        return False
    # a counter that changes in between would be two positions
    return aliases_of_input(here["position"]) is None or not is_written(here["position"])


def _is_range_of_last_dim(mask: Any, keys: int) -> bool:
    """Whether the keys are the last dimension of a mask, which no view has moved elsewhere."""
    node = mask
    while is_call(node, *_SAME_ELEMENTS):
        value = tensor_of(node)
        if value is None or value.dim() == 0 or value.shape[-1] != keys:
            return False
        node = node.args[0]
    value = tensor_of(node)
    return value is not None and value.dim() > 0 and value.shape[-1] == keys
