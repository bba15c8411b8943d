"""Matmuls on a CPU in the kernels for GEMV and GEMM, where these are faster than torch's.

Parallel layers call the kernels themselves (:mod:`paraxis.kernels.cpu.gemv`, :mod:`paraxis.kernels.cpu.gemm_onednn`).
Here are the matmuls outside of parallel layers and, for Inductor, all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..compat.inductor import CustomGraphPass, get_hash_for_files
from ..kernels.cpu import gemm_onednn, gemv
from .moe_experts import is_grouped_mm

aten = torch.ops.aten


def use_cpu_matmul(module: GraphModule, compiled: bool = False) -> int:
    """Run linear layers that are not parallel, and grouped matmuls of experts, in the kernels; how many.

    ``compiled``: grouped matmuls by a registered operator, which a compiler does not look into. Linear layers are then
    replaced by :class:`CpuMatmulPass`, after Inductor's decompositions.
    """
    grouped_mm = torch.ops.paraxis.cpu_grouped_mm.default if compiled else gemv.grouped_mm
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        if not compiled and not node.kwargs:
            node.target = gemv.linear
            count += 1
    for node in module.graph.nodes:
        if is_grouped_mm(node) and not node.kwargs:
            node.target = grouped_mm
            count += 1
    if count:
        module.recompile()
    return count


class CpuMatmulPass(CustomGraphPass):
    """Replaces matmuls in Inductor's graph by the kernels, before Inductor looks for patterns of its own."""

    def __call__(self, graph: Graph) -> None:
        """Replace every ``mm`` and ``addmm`` that a kernel computes faster."""
        for target in (aten.mm.default, aten.addmm.default):
            for node in graph.find_nodes(op="call_function", target=target):
                bias: Any = node.args[0] if target is aten.addmm.default else None
                x, weight = node.args[-2:]
                if node.kwargs or len(node.args) != (2 if bias is None else 3):
                    continue
                kernel = _kernel_for(x, weight, bias)
                if kernel is None:
                    continue
                with graph.inserting_before(node):
                    transposed = _transposed(weight) or graph.call_function(aten.permute.default, (weight, [1, 0]))
                    if "val" not in transposed.meta:
                        transposed.meta["val"] = weight.meta["val"].permute(1, 0)  # type: ignore[union-attr]
                    result = graph.call_function(kernel, (x, transposed, bias))
                result.meta = dict(node.meta)
                node.replace_all_uses_with(result)
                graph.erase_node(node)

    def uuid(self) -> Any:
        """The key of Inductor's cache: another version of the pass or of a kernel compiles anew."""
        return get_hash_for_files((__file__, gemv.__file__, gemm_onednn.__file__))


def _kernel_for(x: Any, weight: Any, bias: Any) -> Any:
    """The operator that computes a matmul faster than torch's; None if there is none."""
    values: list[Any] = [node.meta.get("val") if isinstance(node, Node) else None for node in (x, weight)]
    kernels = ((gemv, torch.ops.paraxis.cpu_gemv), (gemm_onednn, torch.ops.paraxis.onednn_linear))
    kernel = next((packet.default for module, packet in kernels if module.fits(*values)), None)
    if kernel is not None and bias is not None and tuple(bias.meta["val"].shape) != (values[1].shape[1],):
        return None
    return kernel


def _transposed(weight: Any) -> Node | None:
    """The tensor that a weight is the transpose of."""
    if weight.target is aten.permute.default and list(weight.args[1]) == [1, 0]:
        return weight.args[0]  # type: ignore[no-any-return]
    return None
