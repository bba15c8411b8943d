"""Prompts without what only the general case needs.

A cache of a fixed size brings a mask over its whole length even where it is still empty, which rules out the fast
kernels for causal attention; and it counts in a number on the host for each layer, which would be waited for layer by
layer. Layers that give few features leave most of a GPU idle, each by itself: a rank's part of keys and values often
has no more than a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

from ..graph.nodes import argument, shape_of, tidied
from .patterns import unrepeated

aten = torch.ops.aten
MOST = 100
"""Operators that a constant mask may be made by."""
_SPELLED_OUT = 0
"""torch's number for attention without a kernel of its own."""
NARROW = 1024
"""A layer with fewer features than this is joined with others on the same input."""
FEWEST = 512
"""Rows from which on that pays for putting the weights together, which takes as long as 400 rows of the product."""


def drop_causal_masks(module: GraphModule) -> int:
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
        query, *others = node.args[:3]
        options = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
        shared = [unrepeated(x) for x in others]
        groups = {found[1] for found in shared if found is not None}
        if None not in shared and len(groups) == 1 and _takes_groups(node.meta["val"], groups.pop()):
            others = [found[0] for found in shared if found is not None]
            options["enable_gqa"] = True
        with graph.inserting_before(node):
            states = [graph.call_function(aten.slice.Tensor, (x, 2, 0, shape[2])) for x in others]
            result = graph.call_function(node.target, (query, *states, None, 0.0, True), options)  # type: ignore[arg-type]
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return tidied(module, count)


def _takes_groups(query: torch.Tensor, groups: int) -> bool:
    """Whether the kernel for causal attention takes several query heads on one of keys, so that none is copied."""
    if not query.is_cuda or not all(isinstance(n, int) for n in query.shape) or query.shape[1] % groups:
        return False
    with unset_fake_temporarily(), torch.no_grad():
        like: dict[str, Any] = {"dtype": query.dtype, "device": query.device}
        whole = torch.empty(query.shape, **like)
        few = torch.empty(query.shape[0], query.shape[1] // groups, *query.shape[2:], **like)
        plain = torch._fused_sdp_choice(whole, whole, whole, None, 0.0, True)
        return plain != _SPELLED_OUT and plain == torch._fused_sdp_choice(
            whole, few, few, None, 0.0, True, enable_gqa=True
        )


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


def is_prefill(graph: Graph) -> bool:
    """Whether there is a layer with many rows: then memory traffic counts, and not how many kernels there are."""
    products = graph.find_nodes(op="call_function", target=aten.linear.default)
    shapes = [shape_of(node) or () for node in products]
    return any(prod(hint_of(n) for n in shape[:-1]) >= FEWEST for shape in shapes)


def hint_of(size: Any) -> int:
    """The size that a symbolic one had when the program was captured."""
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    return int(hint) if hint is not None else 1


def merge_narrow_linears(module: GraphModule, examples: Sequence[Any]) -> int:
    """One product for all layers with few features on the same input; how many. ``examples`` are the local inputs."""
    graph: Graph = module.graph
    known: dict[Any, Any] = dict(zip(graph.find_nodes(op="placeholder"), examples, strict=True))
    groups: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        given: list[Any] = [known.get(a) for a in node.args[1:] if a is not None]
        if node.kwargs or not given or not all(isinstance(x, torch.Tensor) and x.is_contiguous() for x in given):
            continue
        x, shape, weight = node.args[0], shape_of(node), given[0]
        if shape is None or not all(isinstance(n, int) for n in shape) or prod(shape[:-1]) < FEWEST:
            continue
        if weight.dim() == 2 and 0 < weight.shape[0] < NARROW:
            groups.setdefault((x, len(given), weight.dtype), []).append(node)
    joined = [nodes for nodes in groups.values() if len(nodes) > 1]
    for nodes in joined:
        with graph.inserting_before(min(nodes)):
            parts = [[node.args[i] for node in nodes] for i in range(1, len(nodes[0].args)) if nodes[0].args[i]]
            whole = [graph.call_function(aten.cat.default, (part,)) for part in parts]
            result = graph.call_function(aten.linear.default, (nodes[0].args[0], *whole))
            ends = list(accumulate(known[node.args[1]].shape[0] for node in nodes))
            pieces = [
                graph.call_function(aten.slice.Tensor, (result, -1, start, end))
                for start, end in zip([0, *ends], ends, strict=False)
            ]
        for node, piece in zip(nodes, pieces, strict=True):
            piece.meta = dict(node.meta)
            node.replace_all_uses_with(piece)
            graph.erase_node(node)
    if joined:
        module.recompile()
    return len(joined)


def move_scalars_to_device(graph: Graph, examples: list[Any], device: torch.device) -> list[int]:
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
