"""Our own kernels for attention on a CPU, put where they compute what torch's would."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph.nodes import argument, tidied
from ..kernels.cpu import decode_attention as one_query
from ..kernels.cpu import prefill_attention as causal
from ..kernels.cpu.build import load_kernel
from .kv_cache_append import append, attend_extended
from .patterns import unrepeated

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def use_prefill_attention(module: GraphModule) -> int:
    """Let attention where every query sees the rows up to its own be done by our kernel; how many times."""
    graph = module.graph
    count = 0
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        shared = [unrepeated(x) or (x, 1) for x in node.args[1:3]]
        given = [node.args[0], *(x for x, _ in shared)]
        found: list[Any] = [x.meta.get("val") if isinstance(x, Node) else None for x in given]
        if not _is_exact(node, causal=True) or not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in found):
            continue
        if shared[0][1] != shared[1][1] or not causal.fits(*found) or not _same_batch(*found):
            continue
        with graph.inserting_before(node):
            result = graph.call_function(torch.ops.paraxis.prefill_attention.default, (*given, _scale(node)))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return tidied(module, count)


def use_decode_attention(module: GraphModule, compiled: bool = False) -> int:
    """Let attention of one query on caches that grow in place be one with that; how many times.

    ``compiled``: by an operator that a compiler leaves alone.
    """
    target = torch.ops.paraxis.attend_appended.default if compiled else attend_extended
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    count = 0
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        keys, values = _extended(node.args[1]), _extended(node.args[2])
        if keys is None or values is None or keys is values or not _is_plain(node, keys, values):
            continue
        users = {cache: _others(cache, node, order) for cache in (keys, values)}
        if any(order.get(user, -1) < order[node] for several in users.values() for user in several):
            continue
        users[node] = list(node.users)
        given = (node.args[0], keys.args[0], values.args[0], keys.args[1], values.args[1])
        with graph.inserting_before(node):
            joint = graph.call_function(target, (*given, _scale(node)))
            joint.meta["val"] = tuple(x.meta["val"] for x in (node, keys, values))
            results = [graph.call_function(operator.getitem, (joint, i)) for i in range(3)]
        for old, result in zip((node, keys, values), results, strict=True):
            result.meta = dict(old.meta)
            for user in users[old]:
                user.replace_input_with(old, result)
        graph.erase_node(node)
        count += 1
    return tidied(module, count)


def _extended(node: Any) -> Node | None:
    """What extends the keys or values of an attention; they may be repeated for several queries."""
    repeated = unrepeated(node)
    node = repeated[0] if repeated is not None else node
    return node if isinstance(node, Node) and node.target in (torch.ops.paraxis.append_rows.default, append) else None


def _is_plain(node: Node, keys: Node, values: Node) -> bool:
    """Whether the kernel computes this: one query, which sees all rows."""
    if not _is_exact(node, causal=False):
        return False
    query: Any = node.args[0]
    given: tuple[Any, ...] = (query, keys.args[1], values.args[1])
    found: list[Any] = [x.meta.get("val") if isinstance(x, Node) else None for x in given]
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in found) or found[1].shape != found[2].shape:
        return False
    if not _same_batch(*found):
        return False
    return one_query.fits(found[0], found[1]) and load_kernel("decode_attention") is not None


def _others(cache: Node, attention: Node, order: dict[Node, int]) -> list[Node]:
    """Who uses a cache otherwise than for this attention."""
    return [user for user in cache.users if _leads_elsewhere(user, attention, order)]


def _leads_elsewhere(user: Node, attention: Node, order: dict[Node, int]) -> bool:
    """Whether somebody else than this attention uses what a node gives; what comes later is somebody else."""
    waiting, seen = [user], {attention}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if order.get(node, -1) > order[attention] or not node.users:
            return True
        waiting += node.users
    return False


def _is_exact(node: Node, causal: bool) -> bool:
    """Whether an attention is what kernels know: without a mask, dropout or a scale to be found out."""
    if isinstance(argument(node, 3, "attn_mask", None), Node) or argument(node, 4, "dropout_p", 0.0):
        return False
    value, scale = node.meta.get("val"), node.kwargs.get("scale")
    if isinstance(value, torch.Tensor) and value.dtype != torch.float32:  # cast on the way
        return False
    return bool(argument(node, 5, "is_causal", False)) is causal and isinstance(scale, (int, float, type(None)))


def _scale(node: Node) -> float:
    scale: Any = node.kwargs.get("scale")
    return float(node.args[0].meta["val"].shape[3] ** -0.5 if scale is None else scale)  # type: ignore[union-attr]


def _same_batch(*values: torch.Tensor) -> bool:
    """Whether nothing is repeated along the batch. Sizes may be symbols; the same one has the same name."""
    return len({str(value.shape[0]) for value in values}) == 1
