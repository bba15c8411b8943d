"""Rewrites by Inductor itself: the options of one compilation that ask for them."""

from __future__ import annotations

from torch.fx import GraphModule

from ..compat.inductor import has_custom_pre_pass
from ..optimize.cpu_matmul import CpuMatmulPass
from ..optimize.prefill import is_prefill
from .lift import lifted_of


def store_residual_sums(program: GraphModule) -> int:
    """Let Inductor store the residual sums of a prefill; 1 if it is one, else 0.

    Inductor recomputes a sum at every use. Each sum of a residual stream contains the one before it, so that a use
    would read all terms since the last sum that was stored.
    """
    if not is_prefill(program.graph):
        return 0
    lifted_of(program).inductor["realize_reads_threshold"] = 1
    return 1


def use_cpu_matmul_in_inductor(program: GraphModule) -> int:
    """Run :class:`CpuMatmulPass` before Inductor's post-grad passes, unless the user has set another pass there."""
    if has_custom_pre_pass():
        return 0
    lifted_of(program).inductor["post_grad_custom_pre_pass"] = CpuMatmulPass()
    return 1
