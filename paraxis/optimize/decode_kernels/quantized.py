"""Linear layers with quantized weights on one row (GEMV), with the RMS norm before and the SiLU gate after them, as one
kernel that reads the packed bytes once."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from ...kernels.quantized import Encoding
from ...kernels.quantized.gemv import fits
from ...tensor.quantized import QuantizedTensor
from ..patterns import KERNEL_DTYPES, is_static, tensor_of
from ..quantized_linears import quantized_weight_of
from .linears import MAX_ROW_FEATURES, MAX_WEIGHTS, fuse

CODES, SCALES, ZEROS, ROWS, FACTOR, ENCODING, BIAS = 1, 2, 3, 4, 6, 7, 8
"""Positions among the arguments of ``paraxis::quantized_linear``."""


def replace_quantized_linears(graph: Graph, inputs: dict[Any, Any]) -> int:
    """Replace linear layers with quantized weights on one row by kernels, several on the same row by one; how many."""
    groups: dict[Any, list[Node]] = {}
    weights: dict[Node, QuantizedTensor] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.paraxis.quantized_linear.default):
        weight = quantized_weight_of(node, inputs)
        if weight is not None and _is_gemv(node, weight, inputs):
            weights[node] = weight
            groups.setdefault((node.args[0], *_form(weight), node.args[BIAS] is None), []).append(node)
    count = 0
    for nodes in groups.values():
        for start in range(0, len(nodes), MAX_WEIGHTS):
            _replace_group(graph, nodes[start : start + MAX_WEIGHTS], weights, inputs)
            count += 1
    return count


def _is_gemv(node: Node, weight: QuantizedTensor, inputs: dict[Any, Any]) -> bool:
    """Whether the kernel computes a linear layer: on one row, with a weight that it takes."""
    row, bias = tensor_of(node.args[0]), node.args[BIAS]
    if row is None or not is_static(row) or prod(row.shape[:-1]) != 1 or row.dtype not in KERNEL_DTYPES:
        return False
    if bias is not None:
        value = inputs.get(bias)
        if not isinstance(value, torch.Tensor) or value.dtype != row.dtype or not value.is_contiguous():
            return False
    return weight.inputs <= MAX_ROW_FEATURES and fits(weight.parts, weight.encoding, weight.inputs)


def _form(weight: QuantizedTensor) -> tuple[Any, ...]:
    """What weights of one kernel have in common."""
    return _same_for_all(weight), *((name, part.dtype) for name, part in weight.parts.present()), _factors(weight)


def _factors(weight: QuantizedTensor) -> bool:
    """Whether there is one factor for all rows."""
    return weight.parts.factor is not None and weight.parts.factor.shape[0] == 1


def _same_for_all(weight: QuantizedTensor) -> str:
    """The encoding, the same for weights of different sizes that have one scale each."""
    encoding = weight.encoding
    rows, columns = encoding.block
    if weight.parts.scales.shape == (1, 1) and rows >= weight.shape[0] and columns >= weight.inputs:
        return Encoding(**{**vars(encoding), "block": (1 << 30, columns)}).key
    return encoding.key


def _replace_group(
    graph: Graph, linears: list[Node], weights: dict[Node, QuantizedTensor], inputs: dict[Any, Any]
) -> None:
    first = weights[linears[0]]
    key = _same_for_all(first)

    def arguments(nodes: list[Node]) -> tuple[Any, ...]:
        positions = (CODES, SCALES, ZEROS, ROWS, FACTOR)
        each = [[node.args[i] for node in nodes if node.args[i] is not None] for i in positions]
        return *each, key, [node.args[BIAS] for node in nodes if node.args[BIAS] is not None]

    sizes = {node: weights[node].shape[0] for node in linears}
    operators = torch.ops.paraxis.quantized_gemv.default, torch.ops.paraxis.rmsnorm_quantized_gemv.default
    fuse(graph, linears, sizes, first.inputs, inputs, operators, arguments)
