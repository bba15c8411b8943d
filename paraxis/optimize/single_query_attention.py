"""Attention of a single query without copies of the keys and values.

Models with fewer key/value heads than query heads repeat the former before attention, which copies the whole cache for
every token where no kernel takes it as it is (a static cache comes with a mask, which rules the fast kernels out). One
query per sequence needs no kernel at all: the products are sums over the cache that a compiler fuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..graph.nodes import argument, shape_of, tidied
from .patterns import unrepeated

aten = torch.ops.aten


def decompose_single_query_attention(module: GraphModule) -> int:
    """Replace attention of one query on repeated keys and values, in place; how many times."""
    graph: Graph = module.graph
    count = 0
    for node in list(graph.nodes):
        found = _match(node)
        if found is None:
            continue
        keys, values, groups = found
        with graph.inserting_before(node):
            result = _emit(graph, node, keys, values, groups)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return tidied(module, count)


def _match(node: Node) -> tuple[Node, Node, int] | None:
    """(keys, values, queries per key) of an attention on repeated keys and values with one query."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    query, key, value = node.args[:3]
    mask = argument(node, 3, "attn_mask", None)
    if argument(node, 4, "dropout_p", 0.0) or argument(node, 5, "is_causal", False):
        return None
    shape = shape_of(node)
    if shape is None or len(shape) != 4 or not isinstance(shape[2], int) or shape[2] != 1:
        return None
    if isinstance(mask, Node):
        seen = shape_of(mask)
        if seen is None or len(seen) != 4 or seen[1] != 1:  # a mask per head
            return None
    keys, values = unrepeated(key), unrepeated(value)
    if keys is None or values is None or keys[1] != values[1] or not isinstance(query, Node):
        return None
    return keys[0], values[0], keys[1]


def _emit(graph: Graph, node: Node, keys: Node, values: Node, groups: int) -> Node:
    query: Any = node.args[0]
    mask, scale = argument(node, 3, "attn_mask", None), node.kwargs.get("scale")
    return graph.call_function(attend_one, (query, keys, values, mask, groups, scale))


def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    groups: int,
    scale: float | None,
) -> torch.Tensor:
    """Attention of one query per sequence, ``groups`` query heads on every key/value head. Sums are in float32."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grouped = query.unflatten(1, (-1, groups)).float() * scale  # [batch, key heads, groups, 1, features]
    scores = (grouped * keys.unsqueeze(2).float()).sum(-1)  # [batch, key heads, groups, length]
    if mask is not None:
        seen = mask.expand(-1, -1, 1, -1)
        scores = scores.masked_fill(~seen, float("-inf")) if seen.dtype == torch.bool else scores + seen
    weights = aten._safe_softmax.default(scores, -1).unsqueeze(-1)
    result = (weights * values.unsqueeze(2).float()).sum(-2)  # [batch, key heads, groups, features]
    return result.to(query.dtype).flatten(1, 2).unsqueeze(2)
