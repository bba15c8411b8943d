"""Computing a part of a conversion recipe's result from parts of its inputs.

A checkpoint may store a parameter in another form, and transformers has a recipe that converts it: stack, concatenate,
transpose. A plain run of a recipe reads all of the stored tensors in full. Here it is traced once on meta tensors; an
index into a result is then propagated backwards through the trace, which gives the part of each stored tensor that is
needed. Operators that only move elements have a rule below; the operands of any other one are computed in full, so that
a recipe may do anything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..placement import Ranges

Index = tuple[Ranges, ...]
Fill = Callable[[torch.Tensor, str, Index], None]
"""Writes the part ``index`` of the stored tensor of that name into a tensor of the part's shape."""

_aten = torch.ops.aten
_SAME = {_aten.clone.default, _aten.detach.default, _aten.alias.default, _aten._to_copy.default}
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
_MAX_VIEW_ELEMENTS = 1 << 22  # a view that mixes dimensions with more elements than this is computed in full


class TracedRecipe:
    """A recipe that can compute parts of its results.

    Args:
        recipe: From a function that returns tensors by name to the results by name.
        stored: The stored tensors by name, on ``meta``.
    """

    def __init__(
        self,
        recipe: Callable[[Callable[[str], torch.Tensor]], Mapping[str, torch.Tensor]],
        stored: Mapping[str, torch.Tensor],
    ) -> None:
        names = list(stored)
        results: list[str] = []

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            by_name = dict(zip(names, tensors))
            converted = recipe(by_name.__getitem__)
            results[:] = converted
            return list(converted.values())

        graph = make_fx(run)(*stored.values()).graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._keys = dict(zip(placeholders, names))
        outputs: Any = next(node for node in graph.nodes if node.op == "output").args[0]
        self._outputs: dict[str, fx.Node] = dict(zip(results, outputs))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the results."""
        return {name: _shape(node) for name, node in self._outputs.items()}

    def fill(self, out: torch.Tensor, name: str, index: Index, fill: Fill) -> None:
        """Write the part ``index`` of the result ``name`` into ``out``; ``fill`` reads parts of stored tensors."""
        _Evaluation(self._keys, fill).into(out, self._outputs[name], index)


def full_index(shape: tuple[int, ...]) -> Index:
    """The index of the full tensor."""
    return tuple(((0, size),) for size in shape)


class _Evaluation:
    """Evaluates parts of a traced graph's nodes, on demand and backwards from the result."""

    def __init__(self, keys: Mapping[fx.Node, str], fill: Fill) -> None:
        self.keys, self.fill = keys, fill

    def into(self, out: torch.Tensor, node: fx.Node, index: Index) -> None:
        """Write the part ``index`` of a node's value into ``out``."""
        if out.numel() == 0:
            return
        if node in self.keys:
            self.fill(out, self.keys[node], index)
        elif node.target in _SAME:
            self.into(out, _operand(node), index)
        elif node.target is _aten.cat.default:
            self._cat(out, node, index)
        elif node.target is _aten.stack.default:
            self._stack(out, node, index)
        elif node.target in (_aten.permute.default, _aten.transpose.int, _aten.t.default):
            order = _order(node)
            back = [order.index(dim) for dim in range(len(order))]
            self.into(out.permute(back), _operand(node), tuple(index[dim] for dim in back))
        elif node.target is _aten.unsqueeze.default:
            dim = _dim(node, 1, len(index))
            self.into(out.squeeze(dim), _operand(node), index[:dim] + index[dim + 1 :])
        elif (offset := _offset(node)) is not None:
            source, dim, start = offset
            moved = tuple((a + start, b + start) for a, b in index[dim])
            self.into(out, source, (*index[:dim], moved, *index[dim + 1 :]))
        elif not (node.target in _VIEWS and self._view(out, node, index)):
            out.copy_(_take(self.value(node), index))

    def value(self, node: fx.Node) -> Any:
        """A node's full value."""
        if node in self.keys:
            described = node.meta["val"]
            out = torch.empty(described.shape, dtype=described.dtype)
            self.fill(out, self.keys[node], full_index(tuple(described.shape)))
            return out
        assert callable(node.target), f"{node.op} in a recipe for weights"
        args, kwargs = cast(Any, fx.map_arg(cast(Any, (node.args, node.kwargs)), self.value))
        return node.target(*args, **kwargs)

    def _cat(self, out: torch.Tensor, node: fx.Node, index: Index) -> None:
        tensors: Any = node.args[0]
        dim = _dim(node, 1, len(index))
        start = at = 0
        for tensor in tensors:
            stop = start + _shape(tensor)[dim]
            mine = tuple((max(a, start) - start, min(b, stop) - start) for a, b in index[dim] if a < stop and b > start)
            length = sum(b - a for a, b in mine)
            self.into(out.narrow(dim, at, length), tensor, (*index[:dim], mine, *index[dim + 1 :]))
            start, at = stop, at + length

    def _stack(self, out: torch.Tensor, node: fx.Node, index: Index) -> None:
        tensors: Any = node.args[0]
        dim = _dim(node, 1, len(index))
        selected = [i for a, b in index[dim] for i in range(a, b)]
        for at, i in enumerate(selected):
            self.into(out.select(dim, at), tensors[i], index[:dim] + index[dim + 1 :])

    def _view(self, out: torch.Tensor, node: fx.Node, index: Index) -> bool:
        """Propagate through a view, if the part is a box of its operand too; only dimensions that change matter."""
        before, after = _shape(_operand(node)), _shape(node)
        first = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
        rest = min(len(before), len(after)) - first
        last = next((i for i in range(rest) if before[-1 - i] != after[-1 - i]), rest)
        mixed = slice(first, len(before) - last), slice(first, len(after) - last)
        box = _box(before[mixed[0]], after[mixed[1]], index[mixed[1]])
        if box is None:
            return False
        inner = (*index[:first], *box, *index[len(after) - last :])
        sizes = [_length(ranges) for ranges in inner]
        try:
            part = out.view(sizes)
        except RuntimeError:  # the strides of ``out`` do not allow it
            part = torch.empty(sizes, dtype=out.dtype, device=out.device)
            self.into(part, _operand(node), inner)
            out.copy_(part.view(out.shape))
        else:
            self.into(part, _operand(node), inner)
        return True


def _box(before: tuple[int, ...], after: tuple[int, ...], index: Index) -> Index | None:
    """The box of a tensor of shape ``before`` with the same elements as the box ``index`` of its view ``after``."""
    if prod(_length(ranges) for ranges in index) > _MAX_VIEW_ELEMENTS:
        return full_index(before) if index == full_index(after) else None
    places = np.ix_(*(np.concatenate([np.arange(a, b) for a, b in ranges]) for ranges in index))
    flat = np.ravel_multi_index(np.broadcast_arrays(*places), after).reshape(-1) if after else np.zeros(1, np.int64)
    coordinates = np.unravel_index(flat, before) if before else ()
    needed = [np.unique(c) for c in coordinates]
    if prod(len(n) for n in needed) != len(flat) or (len(flat) > 1 and not bool(np.all(np.diff(flat) > 0))):
        return None
    return tuple(_runs(n) for n in needed)


def _runs(places: np.ndarray[Any, Any]) -> Ranges:
    """Sorted positions as ranges."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(places, breaks))


def _offset(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """For a node that is a slice of another one along a dimension: that node, the dimension, and where it starts."""
    args: Any = node.args
    if node.target is _aten.slice.Tensor:
        source, dim, start, _, step = list(args) + [None, 0, None, None, 1][len(args) :]
        size = _shape(source)[dim]
        start = start or 0
        start = max(start + size, 0) if start < 0 else min(start, size)
        return (source, dim % len(_shape(source)), start) if step == 1 else None
    if node.target is not operator.getitem or not isinstance(args[0], fx.Node):
        return None
    several, which = args
    if several.target not in (_aten.split.Tensor, _aten.split_with_sizes.default):
        return None
    source, sizes = several.args[:2]
    start = sizes * which if isinstance(sizes, int) else sum(sizes[:which])
    return source, _dim(several, 2, len(_shape(source))), start


def _order(node: fx.Node) -> list[int]:
    """Which dimension of the operand each dimension of a permuted tensor is."""
    dims, args = list(range(len(_shape(node)))), cast(Any, node.args)
    if node.target is _aten.permute.default:
        return [dim % len(dims) for dim in args[1]]
    a, b = (0, len(dims) - 1) if node.target is _aten.t.default else args[1:3]
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _dim(node: fx.Node, position: int, dims: int) -> int:
    """The argument ``dim`` of a node."""
    dim: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return int(dim % dims)


def _operand(node: fx.Node) -> fx.Node:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _length(ranges: Ranges) -> int:
    return sum(b - a for a, b in ranges)


def _take(tensor: torch.Tensor, index: Index) -> torch.Tensor:
    for dim, ranges in enumerate(index):
        if ranges != ((0, tensor.shape[dim]),):
            tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in ranges], dim)
    return tensor
