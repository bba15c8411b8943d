"""Fewer, larger collectives: small sums that do not wait for one another are summed together.

A norm over a sharded dimension needs one number per token from all ranks; query and key norms need two such numbers,
which are ready at about the same time. A collective costs mostly its latency, so they share one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from ..plan import CollectivePlan
from ..solver.program import hint

LIMIT = 1 << 16
"""Bytes up to which a sum is worth copying to save a collective."""


def merge_all_reduces(graph: Graph, collectives: list[CollectivePlan], impure: Callable[[Node], bool]) -> None:
    """Combine small all-reduces in place; ``collectives`` loses those that joined another one.

    A sum is known by ``meta["sum"]``: the function that reduces a tensor, its plan, and the fake of the tensor.
    """
    sums = [node for node in graph.nodes if "sum" in node.meta and _bytes(node) <= LIMIT]
    done: set[Node] = set()
    for i, first in enumerate(sums):
        if first in done:
            continue
        for second in sums[i + 1 :]:
            if second in done or second.meta["sum"][2].dtype != first.meta["sum"][2].dtype:
                continue
            waiting = _between(first, second, impure)
            if waiting is not None:
                _join(graph, first, second, waiting)
                plan, other = first.meta["sum"][1], second.meta["sum"][1]
                if plan in collectives and other in collectives:
                    collectives.remove(other)
                    plan.module = f"{plan.module} + {other.module}"
                done |= {first, second}
                break


def _bytes(node: Node) -> int:
    fake = node.meta["sum"][2]
    return prod((hint(n) for n in fake.shape), start=1) * int(fake.dtype.itemsize)


def _between(first: Node, second: Node, impure: Callable[[Node], bool]) -> list[Node] | None:
    """The nodes between two sums that need the first one; None if the second does too, or if order matters there."""
    waiting, known = [], {first}
    node = first.next
    while node is not second:
        if node.op == "output" or impure(node):  # an earlier join has moved the first one behind the second
            return None
        if known & set(node.all_input_nodes):
            known.add(node)
            waiting.append(node)
        node = node.next
    return None if known & set(second.all_input_nodes) else waiting


def _join(graph: Graph, first: Node, second: Node, waiting: list[Node]) -> None:
    reduce = first.meta["sum"][0]

    def sum_together(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both: Any = reduce(torch.cat([a.reshape(-1), b.reshape(-1)]))
        return both[: a.numel()].view(a.shape), both[a.numel() :].view(b.shape)

    sum_together.__module__ = "paraxis"
    sum_together.__qualname__ = "sum_together"
    with graph.inserting_before(second):
        joined = graph.call_function(sum_together, (first.args[0], second.args[0]))
        parts = [graph.call_function(_item, (joined, k)) for k in range(2)]
    for part, node in zip((joined, *parts), (first, first, second), strict=True):
        part.meta = {key: value for key, value in node.meta.items() if key != "sum"}
    first.replace_all_uses_with(parts[0])
    second.replace_all_uses_with(parts[1])
    last = second
    graph.erase_node(first)
    for node in waiting:
        last.append(node)
        last = node
    graph.erase_node(second)


def _item(pair: tuple[torch.Tensor, torch.Tensor], k: int) -> torch.Tensor:
    return pair[k]
