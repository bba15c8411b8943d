"""Fusions for programs that run eagerly: one operator for several that compute the same.

The operators of a decode step are small, and most of their cost is the launch. A GELU that a model writes out is eight
of them, and a linear layer that takes rows has a reshape before and after it. In prefill and training each of the eight
reads and writes memory, and autograd saves most of their results for the backward pass.
"""

from __future__ import annotations

from math import isclose, pi, sqrt
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ..distributed.operators import all_reduce
from ..graph.local_program import FULL
from ..graph.match import ANY, Capture, Op, match
from ..graph.nodes import shape_of, tidied
from ..layers.linear import ColumnParallelLinear, RowParallelLinear
from .patterns import is_slice_of_all

aten = torch.ops.aten

Polynomial = tuple[float, ...]
"""Coefficients of a polynomial, that of the constant first."""
GELU_FACTOR: Polynomial = (0.0, 0.5)
GELU_ARGUMENT: Polynomial = (0.0, sqrt(2 / pi), 0.0, sqrt(2 / pi) * 0.044715)
"""The tanh approximation of GELU is ``GELU_FACTOR(x) * (1 + tanh(GELU_ARGUMENT(x)))``."""
MAX_DEGREE = 3
MAX_POLYNOMIAL_NODES = 16
"""Nodes that are tried as the variable of a polynomial."""


def fuse_eager_operators(module: GraphModule) -> int:
    """Fuse GELUs that are written out, and drop slices of everything and reshapes around linear layers, in place; how
    many of all three."""
    graph = module.graph
    count = sum(_fuse_gelu(node) for node in graph.find_nodes(op="call_function", target=aten.tanh.default))
    count += sum(_drop_slice(node) for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor))
    count += sum(_drop_reshapes(module, node) for node in graph.find_nodes(op="call_function", target=RESHAPE))
    return tidied(module, count)


# -- GELU -------------------------------------------------------------------------------------------------------------


def _fuse_gelu(tanh: Node) -> bool:
    """Replace the GELU that a tanh is part of, if it is, by torch's operator."""
    argument: Any = tanh.args[0]
    for x in _variables(argument):
        value = x.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:  # narrower dtypes round in between
            continue
        if not _is_close(_polynomial(argument, x), GELU_ARGUMENT):
            continue
        for plus_one in tanh.users:
            if plus_one.target is not aten.add.Tensor or not _is_plus_one(plus_one, tanh):
                continue
            for product in list(plus_one.users):
                factor = _other_operand(product, plus_one) if product.target is aten.mul.Tensor else None
                if factor is None or not _is_close(_polynomial(factor, x), GELU_FACTOR):
                    continue
                with product.graph.inserting_before(product):
                    gelu = product.graph.call_function(aten.gelu.default, (x,), {"approximate": "tanh"})
                gelu.meta = dict(product.meta)
                product.replace_all_uses_with(gelu)
                return True
    return False


def _variables(node: Any) -> list[Node]:
    """The nodes that a value may be a polynomial in: all operands of its sums, products and powers."""
    found: list[Node] = []
    pending = [node]
    while pending and len(found) < MAX_POLYNOMIAL_NODES:
        operand = pending.pop()
        if isinstance(operand, Node) and operand not in found:
            found.append(operand)
            if operand.target in (aten.add.Tensor, aten.mul.Tensor, aten.pow.Tensor_Scalar):
                pending += operand.args
    return found


def _polynomial(value: Any, x: Node) -> Polynomial | None:
    """A value as a polynomial in ``x``; None if it is none, or one of high degree."""
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
    """The product of two polynomials; None if its degree is too high."""
    if len(a) + len(b) - 2 > MAX_DEGREE:
        return None
    result = [0.0] * (len(a) + len(b) - 1)
    for i, left in enumerate(a):
        for j, right in enumerate(b):
            result[i + j] += left * right
    return tuple(result)


def _is_close(found: Polynomial | None, expected: Polynomial) -> bool:
    """Whether two polynomials have the same coefficients, up to how many digits a model writes."""
    if found is None or len(found) != len(expected):
        return False
    return all(isclose(a, b, rel_tol=1e-7) for a, b in zip(found, expected, strict=True))


def _is_plus_one(node: Node, tanh: Node) -> bool:
    return not node.kwargs and _other_operand(node, tanh) == 1.0


def _other_operand(node: Node, operand: Node) -> Any:
    """The other operand of a binary operator."""
    if node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    return right if left is operand else left


# -- slices of everything ----------------------------------------------------------------------------------------------


def _drop_slice(node: Node) -> bool:
    """Use a tensor itself in place of ``x[:]``, a view of it, but for inputs and results of the program."""
    source = node.args[0]
    if not is_slice_of_all(node):
        return False
    if not isinstance(source, Node) or source.op != "call_function" or any(u.op == "output" for u in node.users):
        return False
    node.replace_all_uses_with(source)
    return True


# -- reshapes around linear layers -------------------------------------------------------------------------------------

RESHAPE = aten.reshape.default
_ALL_REDUCED = Op(all_reduce, Capture("partial"), ANY, ANY, users=1)
"""The output of a row-parallel layer, summed over the ranks in any shape."""


def _drop_reshapes(module: GraphModule, last: Node) -> bool:
    """Call a linear layer on all dimensions: ``reshape(layer(reshape(x)))`` becomes ``layer(x)``."""
    reduced = match(_ALL_REDUCED, last.args[0])
    layer: Any = last.args[0] if reduced is None else reduced["partial"]
    if not isinstance(layer, Node) or not _is_linear(module, layer) or len(layer.users) != 1:
        return False
    rows: Any = layer.args[0]
    if not isinstance(rows, Node) or rows.target is not RESHAPE or len(layer.args) != 1 or layer.kwargs:
        return False
    x: Any = rows.args[0]
    if not _has_shape_of_layer(x, rows, layer, last):
        return False
    result: Any = last.args[0]
    layer.replace_input_with(rows, x)
    for node in {layer, result}:
        node.meta = {**node.meta, "val": last.meta["val"]}
        if FULL in node.meta:
            node.meta[FULL] = last.meta["val"]
    last.replace_all_uses_with(result)
    return True


def _has_shape_of_layer(x: Any, rows: Node, layer: Node, last: Node) -> bool:
    """Whether the last reshape gives what the layer would give on ``x``: its dimensions but the last."""
    shapes = [shape_of(node) for node in (x, rows, layer, last)]
    if any(shape is None or not all(isinstance(n, int) for n in shape) for shape in shapes):
        return False
    before, flat, output, after = (tuple(shape or ()) for shape in shapes)
    return len(flat) == 2 and before[:-1] == after[:-1] and before[-1] == flat[-1] and output[-1] == after[-1]


def _is_linear(module: GraphModule, node: Node) -> bool:
    """Whether a node is a layer that computes each row from that row alone, whatever the dimensions before the last."""
    if node.op != "call_module":
        return False
    layer = module.get_submodule(str(node.target))
    if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
        return not layer.sequence_parallel
    return type(layer) is nn.Linear
