"""All-reduces of programs that Python runs: on the memory of the partial sums, and with one call.

As an operator of a captured graph, an all-reduce copies its input, starts the collective, and waits for it: three
operators in Python and below it, twice per layer and decode step. The partial sums of a linear layer have no other
use, so that the backend may write the sums over them.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..compat.distributed import resolve_process_group
from ..distributed import collectives
from ..distributed.operators import all_reduce
from ..kernels.cpu.gemv import linear

aten = torch.ops.aten
FRESH = (linear, aten.linear.default, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.matmul.default)
"""What returns memory that nobody else has."""


def run_all_reduces_in_place(module: GraphModule) -> int:
    """All-reduce the results of matmuls where they are, if nothing else reads them; how many."""
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=all_reduce):
        partial = node.args[0]
        if isinstance(partial, Node) and len(partial.users) == 1 and len(node.args) == 3 and partial.target in FRESH:
            node.target = reduced
            count += 1
    if count:
        module.recompile()
    return count


def reduced(partial: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """The sum over the ranks of a group, by its name, of a tensor that has no other use."""
    return collectives.all_reduce(partial, resolve_process_group(group), op, True)  # type: ignore[arg-type]
