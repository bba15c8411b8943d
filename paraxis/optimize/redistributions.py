"""A single rank without redistributions."""

from __future__ import annotations

from torch.fx import GraphModule

from ..distributed.operators import REDISTRIBUTIONS, all_reduce_coalesced
from ..graph.nodes import tidied


def drop_redistributions(module: GraphModule) -> int:
    """Remove the redistributions of a single rank without gradients: each would return its input; how many."""
    count = 0
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in REDISTRIBUTIONS and node.target is not all_reduce_coalesced:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
            count += 1
    return tidied(module, count)
