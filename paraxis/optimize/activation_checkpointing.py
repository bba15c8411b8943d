"""Activation checkpointing in the local program.

What the model runs under ``torch.utils.checkpoint`` is captured as an operator with a subgraph, which is inlined into
the one graph that is solved and partitioned. Partitioning notes on every operator which region it is of. Here the
operators of a region become a program of their own again, which runs under torch's checkpointing: autograd saves no
activation of it, and the backward pass runs it again, collectives included, on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from ..compat.torch import schema_or_none
from ..distributed.random import RandomState
from ..graph.local_program import REGION, info_of


def recompute(module: GraphModule) -> int:
    """Run every checkpointed region under checkpointing, in place; how many.

    A region is not checkpointed, which is correct and saves more activations, if operators of another region are
    between its own, or if it writes to memory.
    """
    regions: dict[str, list[Node]] = {}
    for node in module.graph.nodes:
        if REGION in node.meta:
            regions.setdefault(node.meta[REGION], []).append(node)
    count = 0
    for name, nodes in regions.items():
        region = _calls_between(nodes[0], nodes[-1])
        if {n.meta.get(REGION, name) for n in region} != {name} or any(map(_writes, region)):
            continue
        _extract(module, region, f"recomputed_{count}", info_of(module).random)
        count += 1
    if count:
        module.graph.lint()
        module.recompile()
    return count


def _calls_between(first: Node, last: Node) -> list[Node]:
    """All nodes from one to another, both included, but for placeholders and attributes."""
    found, node = [], first
    while True:
        if node.op not in ("placeholder", "get_attr"):
            found.append(node)
        if node is last:
            return found
        node = node.next


def _writes(node: Node) -> bool:
    """Whether a node writes to memory."""
    schema = schema_or_none(node.target)
    return "writes" in node.meta or (schema is not None and schema.is_mutable)


def _extract(module: GraphModule, region: list[Node], name: str, random: RandomState | None) -> None:
    """Move the nodes of a region into a graph module, and call that where the last of them was."""
    inside = set(region)
    inputs = list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside))
    outputs = [node for node in region if any(user not in inside for user in node.users)]
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in region:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in outputs))
    drawn_from = random if any("random" in node.meta for node in region) else None
    body = GraphModule(module, graph, class_name="Recomputed")
    module.add_submodule(name, body)
    following = region[-1].next
    with module.graph.inserting_before(following):
        inner = module.graph.get_attr(name)
        result = module.graph.call_function(_checkpointed(drawn_from), (inner, *inputs))
        for position, node in enumerate(outputs):
            item = module.graph.call_function(operator.getitem, (result, position))
            item.meta = {key: value for key, value in node.meta.items() if key != REGION}
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
    for node in reversed(region):
        module.graph.erase_node(node)


def _checkpointed(random: RandomState | None) -> Callable[..., Any]:
    """The function that calls a region under checkpointing, named ``recomputed`` in a printed program."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the forward pass, and for the recomputation, which draws the same random numbers."""
        state = None if random is None else random.generator.get_state()
        return nullcontext(), nullcontext() if random is None else _drawing_from(random, state)

    def recomputed(body: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return body(*args)
        # Random operators draw from the program's own state; there is no need to save torch's.
        return checkpoint(
            body, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, determinism_check="none"
        )

    recomputed.__module__ = "paraxis"
    return recomputed


@contextmanager
def _drawing_from(random: RandomState, state: Any) -> Iterator[None]:
    """Draw from an earlier state, and restore the current one."""
    current = random.generator.get_state()
    random.generator.set_state(state)
    try:
        yield
    finally:
        random.generator.set_state(current)
