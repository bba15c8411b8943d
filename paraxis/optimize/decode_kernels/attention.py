"""Attention of one query on a preallocated KV cache, with RoPE and the writes into the cache, as one kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ...graph.match import FALSY, NODE, AnyOf, Arg, Capture, Op, Via, Where, match
from ...graph.nodes import is_impure
from ..patterns import (
    KERNEL_DTYPES,
    attention_of,
    count_queries,
    dtype_of,
    is_input,
    is_kernel_head_size,
    is_position,
    is_static,
    rotary_of,
    tensor_of,
    without_added_dims,
    without_repeated_heads,
)
from .causal_mask import hides_just_later_keys, hides_later_keys
from .scalars import simplify_position

aten = torch.ops.aten

_KV_WRITE = AnyOf(
    Op(
        aten.index_put_.default,
        Capture("cache", Where(is_input)),
        [None, None, Capture("position", Where(is_position))],
        Capture("value", NODE),
        Arg(None, FALSY, False),  # accumulate
    ),
    Op(
        aten.index_copy_.default,
        Capture("cache", Where(is_input)),
        2,
        Capture("position", Where(is_position)),
        Capture("value", NODE),
    ),
)
"""``cache[:, :, position] = value``"""

_KEYS_OR_VALUES = Via(without_repeated_heads, Capture("node", _KV_WRITE))


class _KVWrite(NamedTuple):
    """A write of one position into a preallocated KV cache, which is an input of the program."""

    node: Node
    cache: Node
    position: Node
    value: Node

    @property
    def is_only_use(self) -> bool:
        """Whether nothing else reads the cache: then the kernel that reads it may also write it, which is later."""
        return list(self.cache.users) == [self.node]


class _DecodeAttention(NamedTuple):
    """Attention of one query per sequence on a preallocated KV cache.

    ``is_causal``: no key after the position that is written is visible. The mask is None if all keys up to there are.
    """

    query: Node
    mask: Any
    is_causal: bool
    keys: _KVWrite
    values: _KVWrite
    features: int
    scale: float


def replace_attention(graph: Graph, inputs: dict[Any, Any]) -> int:
    """Replace attention of one query by kernels; how many times."""
    count = 0
    fused_writes: list[Node] = []
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        attention = _decode_attention_of(node, inputs)
        if attention is None:
            continue
        args = _rope_arguments(attention)
        with graph.inserting_before(node):
            if args is not None:
                result = graph.call_function(torch.ops.paraxis.rope_decode_attention.default, args)
                fused_writes += [attention.keys.node, attention.values.node]
            else:
                args = (
                    attention.query,
                    attention.keys.node,
                    attention.values.node,
                    without_added_dims(attention.mask),
                    attention.keys.position if attention.is_causal else None,
                    attention.scale,
                )
                result = graph.call_function(torch.ops.paraxis.decode_attention.default, args)
        result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        simplify_position(graph, attention.keys.position)
        count += 1
    graph.eliminate_dead_code(is_impure_node=is_impure)
    for write in dict.fromkeys(fused_writes):
        if not write.users:  # another reader needs the write earlier; the kernel then writes the same again
            graph.erase_node(write)
    return count


def _decode_attention_of(node: Node, inputs: dict[Any, Any]) -> _DecodeAttention | None:
    """The parts of an attention that the kernels compute; None if they do not compute it."""
    found = attention_of(node)
    if found is None or found.is_causal or count_queries(node) != 1 or not isinstance(found.query, Node):
        return None
    keys, values = (_kv_write_of(states) for states in (found.keys, found.values))
    if keys is None or values is None or keys.position is not values.position:
        return None
    cache: Any = inputs.get(keys.cache)
    value_cache: Any = inputs.get(values.cache)
    if not all(_is_kernel_cache(each, dtype_of(found.query)) for each in (cache, value_cache)):
        return None
    if cache.shape != value_cache.shape or not _is_kernel_mask(found.mask, cache):
        return None
    features = cache.shape[-1]
    scale = features**-0.5 if found.scale is None else found.scale
    where = (keys.position, cache.shape[2])
    mask = None if hides_just_later_keys(found.mask, *where) else found.mask
    is_causal = hides_later_keys(found.mask, *where)
    return _DecodeAttention(found.query, mask, is_causal, keys, values, features, scale)


def _kv_write_of(states: Any) -> _KVWrite | None:
    """The write whose result, perhaps with repeated heads, attention reads as keys or values."""
    found = match(_KEYS_OR_VALUES, states)
    return None if found is None else _KVWrite(**found)


def _is_kernel_cache(cache: Any, dtype: torch.dtype | None) -> bool:
    """Whether the kernels take a KV cache for queries of this dtype."""
    return (
        isinstance(cache, torch.Tensor)
        and cache.dim() == 4
        and cache.stride(3) == 1
        and cache.dtype in KERNEL_DTYPES
        and cache.dtype == dtype
        and is_static(cache)
        and is_kernel_head_size(cache.shape[-1])
    )


def _is_kernel_mask(mask: Any, cache: torch.Tensor) -> bool:
    """Whether the kernels take a mask: none, or one for all heads over the entire cache."""
    if mask is None:
        return True
    value = tensor_of(mask)
    return (
        value is not None
        and value.dim() == 4
        and tuple(value.shape[1:]) == (1, 1, cache.shape[2])
        and value.shape[0] in (1, cache.shape[0])
        and value.dtype in (torch.bool, *KERNEL_DTYPES)
    )


def _rope_arguments(attention: _DecodeAttention) -> tuple[Any, ...] | None:
    """The arguments of the kernel that also applies RoPE and writes the cache; None if it does not compute this."""
    keys, values = attention.keys, attention.values
    query, key = (rotary_of(states, 1, attention.features) for states in (attention.query, keys.value))
    if query is None or key is None or not query.has_angles_of(key):
        return None
    if not (keys.is_only_use and values.is_only_use):
        return None
    cos, sin, mask = (without_added_dims(node) for node in (query.cos, query.sin, attention.mask))
    caches = (keys.cache, values.cache, keys.position)
    return (query.x, key.x, values.value, cos, sin, *caches, mask, attention.is_causal, attention.scale)
