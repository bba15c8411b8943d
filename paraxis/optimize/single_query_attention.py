"""Attention of one query as sums over the KV cache, without copies of it.

Models with fewer key/value heads than query heads repeat the former before attention, which copies the entire KV cache
in every decode step where no kernel takes fewer heads (a static cache comes with a mask, which rules out the flash
kernels). One query per sequence needs no kernel at all: its matmuls are sums over the cache that a compiler fuses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..graph.nodes import shape_of, tidied
from .patterns import attention_of, count_queries, repeated_heads_of

aten = torch.ops.aten


def decompose_single_query_attention(module: GraphModule) -> int:
    """Replace attention of one query on repeated keys and values, in place; how many times."""
    graph: Graph = module.graph
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        found = _single_query_of(node)
        if found is None:
            continue
        with graph.inserting_before(node):
            result = graph.call_function(attend_one, tuple(found))
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return tidied(module, count)


class _SingleQuery(NamedTuple):
    """The arguments of :func:`attend_one`."""

    query: Node
    keys: Node
    values: Node
    mask: Any
    groups: int
    scale: float | None


def _single_query_of(node: Node) -> _SingleQuery | None:
    """The parts of an attention of one query on repeated keys and values."""
    found = attention_of(node)
    if found is None or found.is_causal or count_queries(node) != 1 or not isinstance(found.query, Node):
        return None
    keys, values = repeated_heads_of(found.keys), repeated_heads_of(found.values)
    if keys is None or values is None or keys.repeats != values.repeats:
        return None
    if isinstance(found.mask, Node) and not _is_shared_by_heads(found.mask):
        return None
    return _SingleQuery(found.query, keys.source, values.source, found.mask, keys.repeats, found.scale)


def _is_shared_by_heads(mask: Node) -> bool:
    shape = shape_of(mask)
    return shape is not None and len(shape) == 4 and bool(shape[1] == 1)


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
        mask = mask.expand(-1, -1, 1, -1)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = aten._safe_softmax.default(scores, -1).unsqueeze(-1)
    result = (weights * values.unsqueeze(2).float()).sum(-2)  # [batch, key heads, groups, features]
    return result.to(query.dtype).flatten(1, 2).unsqueeze(2)
