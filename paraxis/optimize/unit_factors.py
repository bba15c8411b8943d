"""Products with one are dropped.

RoPE in transformers multiplies cosines and sines by a scale, which is one unless the context is extended. Inductor
drops such products itself; a program that runs eagerly would launch an operator for each.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..compat.torch import OpOverload
from ..graph.mutation import has_side_effect, is_view
from ..graph.nodes import tidied
from .patterns import is_call, tensor_of

aten = torch.ops.aten


def drop_unit_factors(module: GraphModule) -> int:
    """Replace products of a tensor and the number one by the tensor, in place; how many."""
    count = 0
    for node in list(module.graph.nodes):
        if is_call(node, aten.mul.Tensor, aten.mul.Scalar) and _is_unit(node.args[1]):
            source = node.args[0]
            if isinstance(source, Node) and _same_tensor(source, node) and _is_new(source) and _only_read(source):
                node.replace_all_uses_with(source)
                count += 1
    return tidied(module, count)


def _is_unit(factor: object) -> bool:
    """Whether an operand is the number one."""
    return isinstance(factor, (int, float)) and factor == 1


def _same_tensor(source: Node, product: Node) -> bool:
    """Whether the product has the dtype of its operand: an integer times 1.0 has not."""
    before, after = tensor_of(source), tensor_of(product)
    return before is not None and after is not None and before.dtype == after.dtype


def _is_new(node: Node) -> bool:
    """Whether an operator has created this tensor, so that it shares memory with no input, parameter or KV cache."""
    return node.op == "call_function" and isinstance(node.target, OpOverload) and not is_view(node)


def _only_read(node: Node) -> bool:
    """Whether operators and layers only read a tensor, its views, and its products with one: they become it."""
    for user in node.users:
        if user.op == "call_module":
            continue
        if user.op != "call_function" or not isinstance(user.target, OpOverload) or has_side_effect(user):
            return False
        aliases = is_view(user) or (is_call(user, aten.mul.Tensor, aten.mul.Scalar) and _is_unit(user.args[1]))
        if aliases and not _only_read(user):
            return False
    return True
