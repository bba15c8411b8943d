"""Faster products on a CPU, put where torch would multiply: see ``kernels/few_rows.py`` and ``kernels/many_rows.py``.

Parallel layers use them by themselves. Here are the products that are none of theirs and, for Inductor, all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule, Node

from ..kernels.cpu import gemm_onednn as many_rows
from ..kernels.cpu import gemv as few_rows
from .moe_experts import is_grouped

aten = torch.ops.aten


def use_cpu_matmul(module: GraphModule, compiled: bool = False) -> int:
    """Let products of layers that are not parallel, and of experts, be done by the faster kernels; how many.

    ``compiled``: by operators that a compiler leaves alone. Those of layers are found later, by :class:`CpuMatmulPass`.
    """
    grouped = torch.ops.paraxis.cpu_grouped_mm.default if compiled else few_rows.grouped_mm
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        if not compiled and not node.kwargs:
            node.target = few_rows.linear
            count += 1
    for node in module.graph.nodes:
        if is_grouped(node) and not node.kwargs:
            node.target = grouped
            count += 1
    if count:
        module.recompile()
    return count


class CpuMatmulPass(CustomGraphPass):
    """What Inductor does with products before it looks for other patterns."""

    def __call__(self, graph: Graph) -> None:
        for target in (aten.mm.default, aten.addmm.default):
            for node in graph.find_nodes(op="call_function", target=target):
                bias: Any = node.args[0] if target is aten.addmm.default else None
                x, weight = node.args[-2:]
                if node.kwargs or len(node.args) != (2 if bias is None else 3):
                    continue
                operator = _operator(x, weight, bias)
                if operator is None:
                    continue
                with graph.inserting_before(node):
                    swapped = _swapped(weight) or graph.call_function(aten.permute.default, (weight, [1, 0]))
                    if "val" not in swapped.meta:
                        swapped.meta["val"] = weight.meta["val"].permute(1, 0)  # type: ignore[union-attr]
                    result = graph.call_function(operator, (x, swapped, bias))
                result.meta = dict(node.meta)
                node.replace_all_uses_with(result)
                graph.erase_node(node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, few_rows.__file__, many_rows.__file__))


def _operator(x: Any, weight: Any, bias: Any) -> Any:
    """The one that multiplies these faster; None if there is none."""
    shown = [node.meta.get("val") if isinstance(node, Node) else None for node in (x, weight)]
    operators = ((few_rows, torch.ops.paraxis.cpu_gemv), (many_rows, torch.ops.paraxis.onednn_linear))
    operator = next((found.default for kernel, found in operators if kernel.fits(*shown)), None)
    if operator and bias is not None and tuple(bias.meta["val"].shape) != (shown[1].shape[1],):  # type: ignore[union-attr]
        return None
    return operator


def _swapped(weight: Any) -> Node | None:
    """What a weight is the transposed of."""
    if weight.target is aten.permute.default and list(weight.args[1]) == [1, 0]:
        return weight.args[0]  # type: ignore[no-any-return]
    return None
