"""Linear layers of a batched decode step (skinny GEMM): those on the same rows become one kernel, with their gate."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from ..patterns import is_static, tensor_of
from .linears import bias_of, gate_of, groups_of, has_own_parameters, split_result

aten = torch.ops.aten
DTYPES = (torch.bfloat16, torch.float16)
"""Those that tensor cores multiply."""
MIN_INPUTS = 64
"""Fewer columns than this are a small part of a kernel's tile."""


def replace_batched_linears(graph: Graph, inputs: dict[Any, Any]) -> int:
    """Replace linear layers on the same rows of a batch by kernels; how many kernels."""
    from ...kernels.triton import skinny_gemm  # registers the operator

    by_rows: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        if _is_skinny(node, inputs, skinny_gemm.MAX_ROWS):
            by_rows.setdefault(node.args[0], []).append(node)
    count = 0
    for nodes in by_rows.values():
        for group in groups_of(nodes):
            _replace_group(graph, group, inputs)
            count += 1
    return count


def _is_skinny(node: Node, inputs: dict[Any, Any], most: int) -> bool:
    """Whether the kernel computes a linear layer: on so many rows at most, with parameters that are inputs."""
    rows, weight = tensor_of(node.args[0]), inputs.get(node.args[1])
    if rows is None or not isinstance(weight, torch.Tensor) or not is_static(rows) or node.kwargs:
        return False
    if not 1 < prod(rows.shape[:-1]) <= most or rows.dtype not in DTYPES:
        return False
    return (
        has_own_parameters(node, inputs, rows.dtype)
        and weight.dim() == 2
        and weight.shape[0] > 0
        and weight.shape[1] % 16 == 0
        and weight.shape[1] >= MIN_INPUTS
    )


def _replace_group(graph: Graph, linears: list[Node], inputs: dict[Any, Any]) -> None:
    """Compute linear layers on the same rows by one kernel, together with the gate after them."""
    gate = gate_of(linears)
    if gate is not None:
        linears = [gate.gate, gate.up]
    weights = [node.args[1] for node in linears]
    biases = [bias for node in linears if (bias := bias_of(node)) is not None]
    with graph.inserting_before(min(linears)):
        args = (linears[0].args[0], weights, biases, gate is not None)
        result = graph.call_function(torch.ops.paraxis.skinny_gemm.default, args)
        sizes = [inputs[weight].shape[0] for weight in weights]
        outputs = [result] if gate is not None or len(weights) == 1 else split_result(graph, result, sizes)
    for node, output in zip(linears if gate is None else [gate.product], outputs, strict=True):
        output.meta["val"] = node.meta.get("val")
        node.replace_all_uses_with(output)
