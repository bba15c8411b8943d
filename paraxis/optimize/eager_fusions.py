"""Fewer operators where fewer do the same, in programs that no compiler works on.

A token's operators are small, and each costs mostly its launch: a GELU that a model spells out is eight of them, and
a layer that wants rows has two around it that only change the shape. In a prompt or a training step each of the eight
goes through memory, and most are kept for the backward pass.
"""

from __future__ import annotations

from math import isclose, pi, sqrt
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ..graph.nodes import shape_of, tidied
from ..layers.linear import ColumnParallelLinear, RowParallelLinear

aten = torch.ops.aten

Polynomial = tuple[float, ...]
"""Coefficients, that of the constant first."""
HALF: Polynomial = (0.0, 0.5)
INSIDE: Polynomial = (0.0, sqrt(2 / pi), 0.0, sqrt(2 / pi) * 0.044715)
"""GELU by a hyperbolic tangent is ``HALF(x) * (1 + tanh(INSIDE(x)))``."""
HIGHEST = 3


def fuse_eager_operators(module: GraphModule) -> int:
    """Put shorter equivalents into a program; how many."""
    count = sum(_gelu(node) for node in module.graph.find_nodes(op="call_function", target=aten.tanh.default))
    count += sum(
        _without_reshapes(module, node) for node in module.graph.find_nodes(op="call_function", target=RESHAPE)
    )
    return tidied(module, count)


# -- GELU -------------------------------------------------------------------------------------------------------------


def _gelu(tanh: Node) -> bool:
    """Replace what a hyperbolic tangent belongs to, if that is a GELU, by torch's own."""
    inside: Any = tanh.args[0]
    for x in _below(inside):
        value = x.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:  # narrower ones round in between
            continue
        if not _same(_polynomial(inside, x), INSIDE):
            continue
        for plus_one in tanh.users:
            if plus_one.target is not aten.add.Tensor or not _is_plus_one(plus_one, tanh):
                continue
            for product in list(plus_one.users):
                other = _other(product, plus_one) if product.target is aten.mul.Tensor else None
                if other is None or not _same(_polynomial(other, x), HALF):
                    continue
                with product.graph.inserting_before(product):
                    gelu = product.graph.call_function(aten.gelu.default, (x,), {"approximate": "tanh"})
                gelu.meta = dict(product.meta)
                product.replace_all_uses_with(gelu)
                return True
    return False


def _below(node: Any) -> list[Node]:
    """What a polynomial may be one of: all that its sums, products and powers are made of."""
    found: list[Node] = []
    ahead = [node]
    while ahead and len(found) < 16:
        here = ahead.pop()
        if isinstance(here, Node) and here not in found:
            found.append(here)
            if here.target in (aten.add.Tensor, aten.mul.Tensor, aten.pow.Tensor_Scalar):
                ahead += here.args
    return found


def _polynomial(value: Any, x: Node) -> Polynomial | None:
    """A value as a polynomial of one node, if it is one of low degree."""
    if isinstance(value, (int, float)):
        return (float(value),)
    if value is x:
        return (0.0, 1.0)
    if not isinstance(value, Node) or value.kwargs or len(value.args) != 2:
        return None
    left = _polynomial(value.args[0], x)
    right = _polynomial(value.args[1], x)
    if left is None or right is None:
        return None
    if value.target is aten.add.Tensor:
        longest = max(len(left), len(right))
        padded = [(*each, *[0.0] * (longest - len(each))) for each in (left, right)]
        return tuple(a + b for a, b in zip(*padded, strict=True))
    if value.target is aten.mul.Tensor:
        return _times(left, right)
    if value.target is aten.pow.Tensor_Scalar and right in ((2.0,), (3.0,)):
        square = _times(left, left)
        return square if right == (2.0,) or square is None else _times(square, left)
    return None


def _times(a: Polynomial, b: Polynomial) -> Polynomial | None:
    if len(a) + len(b) - 2 > HIGHEST:
        return None
    result = [0.0] * (len(a) + len(b) - 1)
    for i, left in enumerate(a):
        for j, right in enumerate(b):
            result[i + j] += left * right
    return tuple(result)


def _same(found: Polynomial | None, wanted: Polynomial) -> bool:
    return found is not None and len(found) == len(wanted) and all(map(_close, found, wanted))


def _close(a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=1e-7)


def _is_plus_one(node: Node, tanh: Node) -> bool:
    return not node.kwargs and _other(node, tanh) == 1.0


def _other(node: Node, one: Node) -> Any:
    """The other operand; of a node with itself none."""
    if node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    return right if left is one else left


# -- layers that take rows --------------------------------------------------------------------------------------------

RESHAPE = aten.reshape.default


def _without_reshapes(module: GraphModule, last: Node) -> bool:
    """Give a layer what its rows were made of: ``reshape(layer(reshape(x)))`` becomes ``layer(x)``."""
    node: Any = last.args[0]
    chain: list[Node] = []
    if isinstance(node, Node) and "sum" in node.meta and len(node.users) == 1 and len(node.args) == 1:
        chain.append(node)  # sums over ranks, whatever the shape
        node = node.args[0]
    if not isinstance(node, Node) or not _is_linear(module, node) or len(node.users) != 1:
        return False
    rows: Any = node.args[0]
    if not isinstance(rows, Node) or rows.target is not RESHAPE or len(node.args) != 1 or node.kwargs:
        return False
    whole: Any = rows.args[0]
    shapes = [shape_of(each) for each in (whole, rows, node, last)]
    if any(shape is None or not all(isinstance(n, int) for n in shape) for shape in shapes):
        return False
    before, flat, made, after = (tuple(shape or ()) for shape in shapes)
    if len(flat) != 2 or before[:-1] != after[:-1] or before[-1] != flat[-1] or made[-1] != after[-1]:
        return False
    node.replace_input_with(rows, whole)
    for each in (node, *chain):
        each.meta = {**each.meta, "val": last.meta["val"]}
    last.replace_all_uses_with((chain or [node])[0])
    return True


def _is_linear(module: GraphModule, node: Node) -> bool:
    """Whether a node is a layer that treats every row alike, whatever the dimensions before the last."""
    if node.op != "call_module":
        return False
    layer = module.get_submodule(str(node.target))
    if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
        return not layer.sequence_parallel
    return type(layer) is nn.Linear
