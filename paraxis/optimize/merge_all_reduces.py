"""Small all-reduces that do not depend on one another become one.

A norm over a sharded dimension needs one number per token from all ranks; the norms of query and key need two such
numbers, which are ready at about the same time. The cost of a small all-reduce is its latency, so they share one.
"""

from __future__ import annotations

import operator
from math import prod

from torch.fx import Graph, GraphModule, Node

from ..distributed.operators import all_reduce, all_reduce_coalesced
from ..graph.local_program import COLLECTIVE, FULL, info_of
from ..graph.mutation import has_side_effect
from ..solver.program import hint

MAX_BYTES = 1 << 16
"""Size up to which a tensor is worth copying to save a collective."""


def merge_all_reduces(module: GraphModule) -> int:
    """Merge pairs of small all-reduces in place, also in the program's list of collectives; how many pairs."""
    graph: Graph = module.graph
    collectives = info_of(module).collectives
    small = [n for n in graph.find_nodes(op="call_function", target=all_reduce) if _bytes(n) <= MAX_BYTES]
    merged: set[Node] = set()
    for i, first in enumerate(small):
        if first in merged:
            continue
        for second in small[i + 1 :]:
            same = second.args[1:] == first.args[1:] and second.meta[FULL].dtype == first.meta[FULL].dtype
            if second in merged or not same:
                continue
            dependent = _between(first, second)
            if dependent is not None:
                one, other = first.meta.get(COLLECTIVE), second.meta.get(COLLECTIVE)
                _merge(graph, first, second, dependent)
                if one in collectives and other in collectives:
                    collectives.remove(other)
                    one.module = f"{one.module} + {other.module}"
                merged |= {first, second}
                break
    if merged:
        module.recompile()
    return len(merged) // 2


def _bytes(node: Node) -> int:
    """The size of the tensor that an all-reduce communicates."""
    fake = node.meta[FULL]
    return prod((hint(n) for n in fake.shape), start=1) * int(fake.dtype.itemsize)


def _between(first: Node, second: Node) -> list[Node] | None:
    """The nodes between two all-reduces that depend on the first; None if the second does too, or if order matters."""
    dependent, known = [], {first}
    node = first.next
    while node is not second:
        # The end of the program comes before the second one if an earlier merge has moved the first behind it.
        if node.op == "output" or has_side_effect(node) or "random" in node.meta:
            return None
        if known & set(node.all_input_nodes):
            known.add(node)
            dependent.append(node)
        node = node.next
    return None if known & set(second.all_input_nodes) else dependent


def _merge(graph: Graph, first: Node, second: Node, dependent: list[Node]) -> None:
    """Communicate both where the second one is, and move what depends on the first behind that."""
    with graph.inserting_before(second):
        both = graph.call_function(all_reduce_coalesced, ([first.args[0], second.args[0]], *first.args[1:]))
        results = [graph.call_function(operator.getitem, (both, k)) for k in range(2)]
    for new, old in zip((both, *results), (first, first, second), strict=True):
        new.meta = dict(old.meta)
    first.replace_all_uses_with(results[0])
    second.replace_all_uses_with(results[1])
    last = second
    graph.erase_node(first)
    for node in dependent:
        last.append(node)
        last = node
    graph.erase_node(second)
