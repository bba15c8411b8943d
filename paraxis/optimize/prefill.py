"""Prefill on a GPU: flash attention, fewer and wider GEMMs, no scalars on the host.

A static KV cache comes with a mask over its entire length, which rules out the flash kernels even while the cache is
empty; and each layer counts in a number on the host, which the device would wait for layer by layer. Linear layers with
few features leave most of a GPU idle: a rank's shard of keys and values is often a single head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..compat.torch import OpOverload, fused_sdp_choice, unset_fake_temporarily
from ..graph.nodes import shape_of, tidied
from .patterns import Attention, attention_of, count_queries, repeated_heads_of

aten = torch.ops.aten
MAX_MASK_OPERATORS = 100
"""Operators that may compute a constant mask. The rewrite runs them."""
MAX_NARROW_FEATURES = 1024
"""A linear layer with fewer features than this is narrow: it is merged with others on the same input."""
MIN_PREFILL_ROWS = 512
"""Rows from which on merging pays: concatenating the weights takes as long as 400 rows of the GEMM."""
_MATH_BACKEND = 0
"""What torch calls attention without a fused kernel."""


# -- causal masks ----------------------------------------------------------------------------------------------------


def drop_causal_masks(module: GraphModule) -> int:
    """Attend causally to the prompt alone where a constant mask says just that; how many times."""
    graph: Graph = module.graph
    causal: dict[Node, bool] = {}
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        attention, queries = attention_of(node), count_queries(node)
        if attention is None or attention.is_causal or not isinstance(attention.mask, Node):
            continue
        if queries is None or queries == 1:
            continue
        mask = attention.mask
        if mask not in causal:
            value = _constant(mask)
            causal[mask] = value is not None and _is_causal(value, queries)
        if not causal[mask]:
            continue
        states, options = states_and_options(node, attention)
        with graph.inserting_before(node):
            prompt = [graph.call_function(aten.slice.Tensor, (x, 2, 0, queries)) for x in states]
            args = (attention.query, *prompt, None, 0.0, True)
            result = graph.call_function(aten.scaled_dot_product_attention.default, args, options)
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return tidied(module, count)


def states_and_options(node: Node, attention: Attention, causal: bool = True) -> tuple[list[Any], dict[str, Any]]:
    """Keys and values, and keyword arguments, for attention without a mask. Heads are not repeated where the kernel
    takes fewer of them."""
    options = {name: value for name, value in node.kwargs.items() if name in ("scale", "enable_gqa")}
    keys, values = repeated_heads_of(attention.keys), repeated_heads_of(attention.values)
    if keys is None or values is None or keys.repeats != values.repeats:
        return [attention.keys, attention.values], options
    if not _takes_fewer_heads(node.meta["val"], keys.repeats, causal):
        return [attention.keys, attention.values], options
    return [keys.source, values.source], {**options, "enable_gqa": True}


def _takes_fewer_heads(query: torch.Tensor, repeats: int, causal: bool) -> bool:
    """Whether the kernel for attention takes ``repeats`` query heads per key head, so that none is copied."""
    sizes = [size_hint(n) for n in query.shape]
    if not query.is_cuda or sizes[1] % repeats:
        return False
    with unset_fake_temporarily(), torch.no_grad():
        like: dict[str, Any] = {"dtype": query.dtype, "device": query.device}
        all_heads = torch.empty(sizes, **like)
        fewer = torch.empty(sizes[0], sizes[1] // repeats, *sizes[2:], **like)
        kernel = fused_sdp_choice(all_heads, all_heads, all_heads, None, 0.0, causal)
        return kernel != _MATH_BACKEND and kernel == fused_sdp_choice(
            all_heads, fewer, fewer, None, 0.0, causal, enable_gqa=True
        )


def _constant(node: Node) -> torch.Tensor | None:
    """The value of a node that depends on no input; None if it does, or if many operators compute it."""
    needed: list[Node] = [node]
    for each in needed:
        if each.op != "call_function" or not isinstance(each.target, OpOverload) or len(needed) > MAX_MASK_OPERATORS:
            return None
        needed += [n for n in each.all_input_nodes if n not in needed]
    values: dict[Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for each in sorted(needed):
            args, kwargs = torch.fx.map_arg((each.args, each.kwargs), lambda n: values[n])
            values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
    return values[node] if isinstance(values[node], torch.Tensor) else None


def _is_causal(mask: torch.Tensor, queries: int) -> bool:
    """Whether every query sees the keys up to its own, and no key after the prompt is seen."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[-2] != queries or mask.shape[-1] < queries:
        return False
    causal = torch.ones(queries, mask.shape[-1], dtype=torch.bool, device=mask.device).tril()
    return bool((mask == causal).all())


# -- linear layers ---------------------------------------------------------------------------------------------------


def is_prefill(graph: Graph) -> bool:
    """Whether a linear layer has many rows: then memory traffic matters, and not the number of kernels."""
    linears = graph.find_nodes(op="call_function", target=aten.linear.default)
    shapes = [shape_of(node) or () for node in linears]
    return any(prod(size_hint(n) for n in shape[:-1]) >= MIN_PREFILL_ROWS for shape in shapes)


def size_hint(size: Any) -> int:
    """The size that a symbolic one had when the program was captured."""
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    return int(hint) if hint is not None else 1


def merge_narrow_linears(module: GraphModule, examples: Sequence[Any]) -> int:
    """One GEMM for all narrow linear layers on the same input; how many. ``examples`` are the local inputs."""
    graph: Graph = module.graph
    inputs: dict[Any, Any] = dict(zip(graph.find_nodes(op="placeholder"), examples, strict=True))
    groups: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        parameters: list[Any] = [inputs.get(arg) for arg in node.args[1:] if arg is not None]
        if _has_many_rows(node) and _are_narrow(parameters) and not node.kwargs:
            key = (node.args[0], len(parameters), parameters[0].dtype)
            groups.setdefault(key, []).append(node)
    merged = [nodes for nodes in groups.values() if len(nodes) > 1]
    for nodes in merged:
        with graph.inserting_before(min(nodes)):
            columns = [[node.args[i] for node in nodes] for i in range(1, len(nodes[0].args)) if nodes[0].args[i]]
            joined = [graph.call_function(aten.cat.default, (column,)) for column in columns]
            result = graph.call_function(aten.linear.default, (nodes[0].args[0], *joined))
            ends = list(accumulate(inputs[node.args[1]].shape[0] for node in nodes))
            slices = [
                graph.call_function(aten.slice.Tensor, (result, -1, start, end))
                for start, end in zip([0, *ends], ends, strict=False)
            ]
        for node, output in zip(nodes, slices, strict=True):
            output.meta = dict(node.meta)
            node.replace_all_uses_with(output)
            graph.erase_node(node)
    if merged:
        module.recompile()
    return len(merged)


def _has_many_rows(node: Node) -> bool:
    """Whether a linear layer is that of a prefill of static length."""
    shape = shape_of(node)
    return shape is not None and all(isinstance(n, int) for n in shape) and prod(shape[:-1]) >= MIN_PREFILL_ROWS


def _are_narrow(parameters: list[Any]) -> bool:
    """Whether a weight of few features, and perhaps its bias, are inputs of the program that can be concatenated."""
    if not parameters or not all(isinstance(p, torch.Tensor) and p.is_contiguous() for p in parameters):
        return False
    weight = parameters[0]
    return bool(weight.dim() == 2 and 0 < weight.shape[0] < MAX_NARROW_FEATURES)


# -- scalars ---------------------------------------------------------------------------------------------------------


def move_scalars_to_device(graph: Graph, examples: list[Any], device: torch.device) -> list[int]:
    """Make integers on the host, which the program only copies to the device, inputs on the device; which inputs.

    ``examples`` are the inputs of the program, and are changed accordingly.
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
    """Whether a node copies a tensor of this dtype to this kind of device."""
    value = node.meta.get("val")
    converts = getattr(node.target, "overloadpacket", None) in (aten.to, aten._to_copy)
    return converts and isinstance(value, torch.Tensor) and value.device.type == device.type and value.dtype == dtype
