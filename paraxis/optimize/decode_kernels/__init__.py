"""Triton kernels for decode steps, in place of the operators that they compute.

In the local program of a decode step this finds linear layers on one row (GEMV), with the RMS norm before and the SiLU
gate after them; those of a batch (skinny GEMM), with the gate; and attention of one query on a preallocated
KV cache, with the rotary embedding of query and key and the writes into the cache. Each becomes one kernel. What does
not match exactly stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from ...distributed.operators import all_reduce
from ...graph.nodes import is_impure
from .attention import replace_attention
from .batched_linears import replace_batched_linears
from .linears import replace_linears
from .quantized import replace_quantized_linears
from .scalars import decompose_outer_products, merge_counter_increments


def use_decode_kernels(module: GraphModule, examples: Sequence[Any], merge_counters: bool = True) -> int:
    """Replace in place what the kernels compute; how many times. ``examples`` are the local inputs.

    Without ``merge_counters``, each counter of a KV cache is incremented by an operator of its own.
    """
    from ...kernels.triton import decode_attention, gemv  # registers the operators

    graph = module.graph
    inputs: dict[Any, Any] = dict(zip(graph.find_nodes(op="placeholder"), examples, strict=True))
    for node, value in inputs.items():
        node.meta["val"] = value
    for node in graph.nodes:  # an all-reduce has the shape of its input
        if node.target is all_reduce and "val" not in node.meta:
            node.meta["val"] = node.args[0].meta.get("val")
    decompose_outer_products(graph)
    merge_counter_increments(graph, merge_counters)
    count = replace_attention(graph, inputs)
    count += replace_linears(graph, inputs)
    count += replace_batched_linears(graph, inputs)
    count += replace_quantized_linears(graph, inputs)
    graph.eliminate_dead_code(is_impure_node=is_impure)
    module.recompile()
    return count
