"""Activation checkpointing in the local program.

What the model runs under ``torch.utils.checkpoint`` is captured as an operator with a subgraph, and analysed as part of
the one graph. Its operators carry the name of that region through the rewriting; here those of a region become a
program of their own again, which runs under torch's checkpointing: nothing of its inside is kept for the backward pass,
which computes it a second time, collectives and all, on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from ..distributed.random import RandomState
from ..graph.local_program import REGION, info_of


def recompute(module: GraphModule) -> int:
    """Make a checkpointed program of every region, in place; how many there were.

    A region is left as it is, which is right and keeps more memory, where it is not one piece of the program or writes
    to memory that it does not own.
    """
    found: dict[str, list[Node]] = {}
    for node in module.graph.nodes:
        if REGION in node.meta:
            found.setdefault(node.meta[REGION], []).append(node)
    count = 0
    for name, nodes in found.items():
        piece = _between(nodes[0], nodes[-1])
        if {n.meta.get(REGION, name) for n in piece} != {name} or any(map(_writes, piece)):
            continue
        _extract(module, piece, f"recomputed_{count}", info_of(module).random)
        count += 1
    if count:
        module.graph.lint()
        module.recompile()
    return count


def _between(first: Node, last: Node) -> list[Node]:
    """All nodes from one to another, less those that only name something."""
    found, node = [], first
    while True:
        if node.op not in ("placeholder", "get_attr"):
            found.append(node)
        if node is last:
            return found
        node = node.next


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return "writes" in node.meta or (schema is not None and schema.is_mutable)


def _extract(module: GraphModule, piece: list[Node], name: str, random: RandomState | None) -> None:
    """Move nodes into a graph of their own, and call that where the last of them was."""
    inside = set(piece)
    inputs = list(dict.fromkeys(n for node in piece for n in node.all_input_nodes if n not in inside))
    outputs = [node for node in piece if any(user not in inside for user in node.users)]
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in piece:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in outputs))
    draws = random if any("random" in node.meta for node in piece) else None
    body = GraphModule(module, graph, class_name="Recomputed")
    module.add_submodule(name, body)
    following = piece[-1].next
    with module.graph.inserting_before(following):
        inner = module.graph.get_attr(name)
        result = module.graph.call_function(_recomputed(draws), (inner, *inputs))
        for position, node in enumerate(outputs):
            item = module.graph.call_function(operator.getitem, (result, position))
            item.meta = {key: value for key, value in node.meta.items() if key != REGION}
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
    for node in reversed(piece):
        module.graph.erase_node(node)


def _recomputed(random: RandomState | None) -> Callable[..., Any]:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        state = None if random is None else random.generator.get_state()
        return nullcontext(), nullcontext() if random is None else _drawing_from(random, state)

    def recomputed(body: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return body(*args)
        # Random operators seed themselves from the state of this project; torch's own need not be kept.
        return checkpoint(
            body, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, determinism_check="none"
        )

    recomputed.__module__ = "paraxis"
    return recomputed


@contextmanager
def _drawing_from(random: RandomState, state: Any) -> Iterator[None]:
    """Draw again what was drawn from that state on."""
    now = random.generator.get_state()
    random.generator.set_state(state)
    try:
        yield
    finally:
        random.generator.set_state(now)
