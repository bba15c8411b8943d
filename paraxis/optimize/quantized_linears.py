"""Linear layers with a quantized weight as one operator on the tensors that the weight consists of.

The shard of a quantized weight is a tensor subclass, and ``aten.linear`` on it is an operator on its codes and scales.
Here that operator is in the program itself, where rewrites for a device find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph.nodes import tidied
from ..kernels.quantized import Parts
from ..tensor.quantized import QuantizedTensor, part_of

aten = torch.ops.aten


def use_quantized_linears(module: GraphModule, examples: Sequence[Any]) -> int:
    """Replace ``aten.linear`` with a quantized weight; how many times. ``examples`` are the inputs of the program."""
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    weights = {n: x for n, x in zip(placeholders, examples, strict=True) if isinstance(x, QuantizedTensor)}
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        weight = weights.get(node.args[1])
        if weight is None or weight.transposed or weight.dim() != 2 or node.kwargs:
            continue
        x, source = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else None
        with graph.inserting_before(node):
            parts = [_part(graph, source, name) if part is not None else None for name, part in _named(weight.parts)]
            args = (x, *parts, weight.encoding.key, bias)
            result = graph.call_function(torch.ops.paraxis.quantized_linear.default, args)
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return tidied(module, count)


def _named(parts: Parts) -> list[tuple[str, torch.Tensor | None]]:
    return list(zip(parts._fields, parts, strict=True))


def _part(graph: Any, weight: Node, name: str) -> Node:
    """The node of a part of a weight; all uses of the weight share it."""
    for user in weight.users:
        if user.target is part_of and user.args[1] == name:
            return user
    with graph.inserting_after(weight):
        return graph.call_function(part_of, (weight, name))


def quantized_weight_of(node: Node, inputs: dict[Any, Any]) -> QuantizedTensor | None:
    """The quantized weight of a linear layer, from the inputs of the program; None if a node is something else."""
    if node.op != "call_function" or node.target is not torch.ops.paraxis.quantized_linear.default:
        return None
    codes: Any = node.args[1]
    if not isinstance(codes, Node) or codes.target is not part_of:
        return None
    weight = inputs.get(codes.args[0])
    return weight if isinstance(weight, QuantizedTensor) else None
