"""Attention masks that hide nothing, or what comes later: attention without a mask, which has faster kernels.

A model that runs eagerly looks whether there is padding and leaves its mask out. Captured, it computes the mask from
positions, for every number of tokens: each layer then converts it, repeats keys and values, and runs on a kernel for
any mask. Here the computation of a mask is followed symbolically: which position a tensor of positions has at which
index, and what a comparison of two of them says for all numbers of tokens.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..graph.nodes import shape_of, tidied
from .patterns import attention_of, is_slice_of_all
from .prefill import states_and_options

aten = torch.ops.aten


class Seen(Enum):
    """Which keys a query sees."""

    ALL = "all"
    CAUSAL = "those up to its own index"


@dataclass(frozen=True)
class Positions:
    """A tensor of integers that are ``start`` plus the index in one dimension, or ``start`` everywhere.

    Attributes:
        rank: Its dimensions.
        dim: The dimension, from the end; 0 if there is none.
        start: The first integer.
        size: How many there are.
    """

    rank: int
    dim: int
    start: Any
    size: Any

    @property
    def last(self) -> Any:
        """The largest integer."""
        return self.start + self.size - 1 if self.dim else self.start


def drop_plain_masks(module: GraphModule) -> int:
    """Attend without a mask where it is known to hide nothing, or keys after the query alone; how many times."""
    known: dict[Node, Any] = {}
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        attention = attention_of(node)
        if attention is None or attention.is_causal or not isinstance(attention.mask, Node):
            continue
        seen = _follow(attention.mask, known)
        query, keys = shape_of(attention.query), shape_of(attention.keys)
        if not isinstance(seen, Seen) or query is None or keys is None or len(query) != 4 or len(keys) != 4:
            continue
        causal = seen is Seen.CAUSAL
        if causal and not _is_zero(_expression(query[2]) - _expression(keys[2])):
            continue
        states, options = states_and_options(node, attention, causal)
        with module.graph.inserting_before(node):
            result = module.graph.call_function(
                aten.scaled_dot_product_attention.default, (attention.query, *states, None, 0.0, causal), options
            )
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
        count += 1
    return tidied(module, count)


# -- following the computation of a mask ------------------------------------------------------------------------------


def _follow(value: Any, known: dict[Node, Any]) -> Any:
    """The :class:`Positions` or :class:`Seen` that a value is; None if it is something else, or unknown."""
    if not isinstance(value, Node):
        return None
    if value not in known:
        known[value] = None
        known[value] = _followed(value, known)
    return known[value]


def _followed(node: Node, known: dict[Node, Any]) -> Any:
    if node.op != "call_function":
        return None
    target, args, result = node.target, node.args, node.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return None
    if target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return _arange(args) if result.dtype in _INTEGERS else None
    if target is aten.full.default:
        return Seen.ALL if args[1] is True and result.dtype == torch.bool else None
    if target in (aten.ones.default, aten.new_ones.default):
        return Seen.ALL if result.dtype == torch.bool else None
    if target in _COMPARISONS and len(args) == 2:
        return _compare(_COMPARISONS[target], _follow(args[0], known), _follow(args[1], known))
    source = _follow(args[0], known) if args else None
    if source is None:
        return None
    if isinstance(source, Seen):
        return _mask(node, source, known)
    if target in (aten.add.Tensor, aten.sub.Tensor) and len(args) == 2 and not node.kwargs:
        added = _expression(args[1])
        if added is None:
            return None
        return replace(source, start=source.start + (added if target is aten.add.Tensor else -added))
    if target is aten.unsqueeze.default:
        at = int(args[1]) % (source.rank + 1)  # type: ignore[arg-type]
        place = source.rank + source.dim  # of the dimension, from the front
        return replace(source, rank=source.rank + 1, dim=source.dim - 1 if source.dim and at > place else source.dim)
    if target in _SAME:
        return source if result.dtype in _INTEGERS else None
    return source if is_slice_of_all(node) else None


_COMPARISONS = {
    aten.le.Tensor: (False, 0),
    aten.lt.Tensor: (False, -1),
    aten.ge.Tensor: (True, 0),
    aten.gt.Tensor: (True, -1),
}
"""``a <= b + n``, or ``b <= a + n`` if the operands are swapped: (swapped, n)."""
_INTEGERS = (torch.int64, torch.int32)
"""Dtypes that have all positions."""
_SAME = (aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.clone.default)
"""Operators that return the same values, in another dtype maybe."""
_MASKS = (aten.expand.default, aten.unsqueeze.default, aten.view.default, aten.reshape.default, *_SAME)
"""Operators that return the same mask, with other dimensions maybe."""


def _arange(args: tuple[Any, ...]) -> Positions | None:
    if len(args) > 2:
        return None
    start, end = (0, args[0]) if len(args) == 1 else args
    first, behind = _expression(start), _expression(end)
    return None if first is None or behind is None else Positions(1, -1, first, behind - first)


def _compare(how: tuple[bool, int], left: Any, right: Any) -> Seen | None:
    """What a comparison of two tensors of positions says of every query (dimension -2) and key (dimension -1)."""
    swapped, more = how
    if swapped:
        left, right = right, left
    if not isinstance(left, Positions) or not isinstance(right, Positions):
        return None
    if _is_nonpositive(left.last - right.start - more):
        return Seen.ALL
    if left.dim == -1 and right.dim == -2 and _is_zero(left.start - right.start - more):
        return Seen.CAUSAL
    return None


def _mask(node: Node, source: Seen, known: dict[Node, Any]) -> Seen | None:
    """The mask that an operator makes of one that is known."""
    if node.target in (aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.logical_and.default):
        other = _follow(node.args[1], known)
        if not isinstance(other, Seen):
            return None
        return source if other is Seen.ALL else other
    if node.target not in _MASKS or node.meta["val"].dtype != torch.bool:
        return None
    if node.target in (aten.view.default, aten.reshape.default, aten.unsqueeze.default):
        return source if source is Seen.ALL or _keeps_last_dims(node) else None
    return source


def _keeps_last_dims(node: Node) -> bool:
    """Whether queries and keys stay the last two dimensions."""
    before, after = shape_of(node.all_input_nodes[0]), shape_of(node)
    return before is not None and after is not None and len(before) > 1 and tuple(before[-2:]) == tuple(after[-2:])


# -- sizes as expressions ---------------------------------------------------------------------------------------------


def _expression(value: Any) -> Any:
    """An integer as an expression of the sizes that the program computes with; None if it is no integer."""
    if isinstance(value, torch.SymInt):
        return value.node.expr
    if not isinstance(value, Node):
        return sympy.Integer(value) if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value.meta.get("val"), torch.Tensor):
        return None
    if value.target is torch.sym_sum:
        parts = [_expression(x) for x in value.args[0]]  # type: ignore[union-attr]
        return None if None in parts else sum(parts, sympy.Integer(0))
    if value.target in (operator.add, operator.sub, operator.mul):
        operands = [_expression(x) for x in value.args]
        return None if None in operands else value.target(*operands)  # type: ignore[operator]
    return sympy.Symbol(value.name, integer=True)  # the same number wherever it is used


def _is_zero(expression: Any) -> bool:
    return bool(sympy.expand(expression) == 0)


def _is_nonpositive(expression: Any) -> bool:
    return sympy.expand(expression).is_nonpositive is True
