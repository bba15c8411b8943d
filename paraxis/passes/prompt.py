"""Prompts without what only the general case needs.

A cache of a fixed size brings a mask over its whole length even where it is still empty, which rules out the fast
kernels for causal attention; and it counts in a number on the host for each layer, which would be waited for layer by
layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

from .grouped import argument, is_impure, shape_of

aten = torch.ops.aten
MOST = 100
"""Operators that a constant mask may be made by."""


def open_causal_masks(module: GraphModule) -> int:
    """Attend to the prompt alone where the mask is known to be causal and to hide the rest; how many times."""
    graph: Graph = module.graph
    known: dict[Node, bool] = {}
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        mask, shape = argument(node, 3, "attn_mask", None), shape_of(node)
        if not isinstance(mask, Node) or shape is None or len(shape) != 4 or not isinstance(shape[2], int):
            continue
        if shape[2] == 1 or argument(node, 4, "dropout_p", 0.0) or argument(node, 5, "is_causal", False):
            continue
        if mask not in known:
            value = _constant(mask)
            known[mask] = value is not None and _is_causal(value, shape[2])
        if not known[mask]:
            continue
        with graph.inserting_before(node):
            query, *others = node.args[:3]
            states = [graph.call_function(aten.slice.Tensor, (x, 2, 0, shape[2])) for x in others]
            result = graph.call_function(node.target, (query, *states, None, 0.0, True))  # type: ignore[arg-type]
        result.kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    if count:
        graph.eliminate_dead_code(is_impure_node=is_impure)
        module.recompile()
    return count


def _constant(node: Node) -> torch.Tensor | None:
    """The value of a node that depends on no input; None if it does, or if many operators make it."""
    needed: list[Node] = [node]
    for one in needed:
        if one.op != "call_function" or not isinstance(one.target, torch._ops.OpOverload) or len(needed) > MOST:
            return None
        needed += [n for n in one.all_input_nodes if n not in needed]
    values: dict[Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for one in sorted(needed):
            args, kwargs = torch.fx.map_arg((one.args, one.kwargs), lambda n: values[n])
            values[one] = one.target(*args, **kwargs)  # type: ignore[operator]
    return values[node] if isinstance(values[node], torch.Tensor) else None


def _is_causal(mask: torch.Tensor, length: int) -> bool:
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[-2] != length or mask.shape[-1] < length:
        return False
    causal = torch.ones(length, mask.shape[-1], dtype=torch.bool, device=mask.device).tril()
    return bool((mask == causal).all())


def give_on_device(graph: Graph, examples: list[Any], device: torch.device) -> list[int]:
    """Take numbers on the host that are only copied to the device as numbers on the device; which arguments.

    ``examples`` are those of the placeholders, and become what they are then.
    """
    moved = []
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        value = examples[i]
        if not isinstance(value, torch.Tensor) or value.is_cuda or value.dim() or value.dtype != torch.int64:
            continue
        if not node.users or not all(_copies_to(user, value.dtype, device) for user in node.users):
            continue
        for user in list(node.users):
            with graph.inserting_before(user):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta = dict(user.meta)
            user.replace_all_uses_with(copy)
            graph.erase_node(user)
        with value.fake_mode:  # type: ignore[attr-defined]
            examples[i] = torch.empty((), dtype=value.dtype, device=device)
        moved.append(i)
    return moved


def _copies_to(node: Node, dtype: torch.dtype, device: torch.device) -> bool:
    value = node.meta.get("val")
    converts = str(node.target).startswith(("aten.to.", "aten._to_copy."))
    return converts and isinstance(value, torch.Tensor) and value.device.type == device.type and value.dtype == dtype
