"""Attention on a CPU in the kernels for prefill and for decode, where they compute what torch's would."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph.nodes import tidied
from ..kernels.cpu import decode_attention, prefill_attention
from ..kernels.cpu.build import load_kernel
from .kv_cache_append import append, attend_extended
from .patterns import Attention, RepeatedHeads, attention_of, repeated_heads_of, without_repeated_heads

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def use_prefill_attention(module: GraphModule) -> int:
    """Replace causal attention of many queries by the kernel for prefill, in place; how many times."""
    graph = module.graph
    count = 0
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        attention = _unmasked_attention_of(node, causal=True)
        if attention is None:
            continue
        keys, values = (repeated_heads_of(x) or RepeatedHeads(x, 1) for x in (attention.keys, attention.values))
        states = (attention.query, keys.source, values.source)
        tensors = _states_of(*states)
        if tensors is None or keys.repeats != values.repeats:
            continue
        if not prefill_attention.fits(*tensors) or not _has_one_batch(*tensors):
            continue
        with graph.inserting_before(node):
            args = (*states, _scale_of(attention))
            result = graph.call_function(torch.ops.paraxis.prefill_attention.default, args)
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return tidied(module, count)


def use_decode_attention(module: GraphModule, compiled: bool = False) -> int:
    """Replace attention of one query, and the appends to its KV cache, by the kernel for decode; how many times.

    ``compiled``: by a registered operator, which a compiler does not look into.
    """
    target = torch.ops.paraxis.attend_appended.default if compiled else attend_extended
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    count = 0
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        attention = _unmasked_attention_of(node, causal=False)
        if attention is None:
            continue
        keys, values = _append_of(attention.keys), _append_of(attention.values)
        if keys is None or values is None or keys is values or not _is_decode(attention.query, keys, values):
            continue
        users = {cache: _other_users(cache, node, order) for cache in (keys, values)}
        if any(order.get(user, -1) < order[node] for several in users.values() for user in several):
            continue
        users[node] = list(node.users)
        pasts, rows = (keys.args[0], values.args[0]), (keys.args[1], values.args[1])
        with graph.inserting_before(node):
            joint = graph.call_function(target, (attention.query, *pasts, *rows, _scale_of(attention)))
            joint.meta["val"] = tuple(x.meta["val"] for x in (node, keys, values))
            results = [graph.call_function(operator.getitem, (joint, i)) for i in range(3)]
        for old, result in zip((node, keys, values), results, strict=True):
            result.meta = dict(old.meta)
            for user in users[old]:
                user.replace_input_with(old, result)
        graph.erase_node(node)
        count += 1
    return tidied(module, count)


def _append_of(states: Any) -> Node | None:
    """The append to a KV cache whose result, perhaps with repeated heads, attention reads as keys or values."""
    node = without_repeated_heads(states)
    is_append = isinstance(node, Node) and node.target in (torch.ops.paraxis.append_rows.default, append)
    return node if is_append else None


def _is_decode(query: Any, keys: Node, values: Node) -> bool:
    """Whether the kernel for decode computes attention of this query on these appends to a KV cache."""
    states = _states_of(query, keys.args[1], values.args[1])
    if states is None:
        return False
    queries, new_keys, new_values = states
    if new_keys.shape != new_values.shape or not _has_one_batch(*states):
        return False
    return decode_attention.fits(queries, new_keys) and load_kernel("decode_attention") is not None


def _other_users(cache: Node, attention: Node, order: dict[Node, int]) -> list[Node]:
    """The users of a KV cache that are not only on the way to this attention."""
    return [user for user in cache.users if _reaches_others(user, attention, order)]


def _reaches_others(user: Node, attention: Node, order: dict[Node, int]) -> bool:
    """Whether a node, or what is computed from it, is used elsewhere than in this attention: later, or nowhere."""
    pending, seen = [user], {attention}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if order.get(node, -1) > order[attention] or not node.users:
            return True
        pending += node.users
    return False


def _unmasked_attention_of(node: Node, causal: bool) -> Attention | None:
    """The arguments of an attention in float32, with a constant scale, and without mask and dropout."""
    attention, value = attention_of(node), node.meta.get("val")
    if attention is None or isinstance(attention.mask, Node) or bool(attention.is_causal) is not causal:
        return None
    if isinstance(value, torch.Tensor) and value.dtype != torch.float32:  # autocast would cast the inputs
        return None
    return attention if isinstance(attention.scale, (int, float, type(None))) else None


def _states_of(*nodes: Any) -> list[torch.Tensor] | None:
    """Fake queries, keys or values; None if one has not four dimensions."""
    values: list[Any] = [node.meta.get("val") if isinstance(node, Node) else None for node in nodes]
    return values if all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in values) else None


def _scale_of(attention: Attention) -> float:
    scale = attention.scale
    return float(attention.query.meta["val"].shape[3] ** -0.5 if scale is None else scale)


def _has_one_batch(*values: torch.Tensor) -> bool:
    """Whether nothing is broadcast along the batch. Symbolic sizes are compared by name, which adds no guard."""
    return len({str(value.shape[0]) for value in values}) == 1
