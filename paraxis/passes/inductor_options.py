"""Rewrites that Inductor does, asked for by options of one compilation."""

from __future__ import annotations

from torch.fx import GraphModule

from ..compat.inductor import has_custom_pre_pass
from ..optimize.cpu_matmul import CpuMatmulPass
from ..optimize.prefill import is_prefill
from .lift import lifted_of


def store_residual_sums(program: GraphModule) -> int:
    """Of a prefill, store a sum that is used again: computing it anew reads all its terms, and of the sums around a
    residual connection there are as many as since the last one stored."""
    if not is_prefill(program.graph):
        return 0
    lifted_of(program).inductor["realize_reads_threshold"] = 1
    return 1


def use_cpu_matmul_in_inductor(program: GraphModule) -> int:
    """Run :class:`CpuMatmulPass` before Inductor's own passes after autograd, unless the user has another one there."""
    if has_custom_pre_pass():
        return 0
    lifted_of(program).inductor["post_grad_custom_pre_pass"] = CpuMatmulPass()
    return 1
