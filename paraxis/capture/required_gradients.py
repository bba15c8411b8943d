"""``x.requires_grad_()`` on an intermediate result, as ``enable_input_require_grads`` does to the embeddings.

It lets reentrant checkpointing see an input that requires a gradient, and changes no gradient of a parameter. The local
program needs no such input, and computes no gradient for a tensor that nobody trains. So the call is noted on the node
that it is made on (``meta["requires_grad"]``), and dropped.

That is wrong where somebody outside of the graph differentiates with respect to this tensor, or relies on a result to
require a gradient. Then the graph breaks, and Python runs the call.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..errors import GraphBreak

REQUIRES_GRAD = "requires_grad"
"""The key of ``node.meta`` that says that the model called ``requires_grad_()`` on this result."""


def check_required_gradients(captured: GraphModule, of_model: bool, name: str) -> None:
    """Raise GraphBreak if a result lacks the gradient that the forward has asked for.

    What the model itself returns is a copy for its caller (``of_model``): whoever differentiates it gets torch's error.
    What a submodule returns is an input of Python code, such as reentrant checkpointing, which returns no gradients
    for inputs that require none.
    """
    if not torch.is_grad_enabled():
        return
    noted = _noted(captured)
    if not noted:
        return
    lost = set(noted)
    if not of_model:
        inputs = [n for n in captured.graph.nodes if n.op in ("placeholder", "get_attr") and _is_differentiable(n)]
        lost = _reached(noted) - _reached(inputs)
    for node in captured.graph.output_node().all_input_nodes:
        if node in lost:
            raise GraphBreak(
                f"{name or 'the model'} calls requires_grad_() on a tensor {_shape(node)} that leaves the graph, so "
                "that its gradient may be read outside of it"
            )


def _noted(captured: GraphModule) -> list[Node]:
    """The results that ``requires_grad_()`` was called on, and the calls of graphs that have such results inside."""
    children = captured.named_children()
    inner = {name for name, module in children if isinstance(module, GraphModule) and _noted(module)}
    return [
        node
        for node in captured.graph.nodes
        if REQUIRES_GRAD in node.meta or any(n.op == "get_attr" and n.target in inner for n in node.all_input_nodes)
    ]


def _is_differentiable(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _reached(nodes: list[Node]) -> set[Node]:
    """These nodes, and all that depend on them."""
    found, queue = set(nodes), list(nodes)
    while queue:
        new = [user for user in queue.pop().users if user not in found]
        found.update(new)
        queue += new
    return found


def _shape(node: Node) -> str:
    value = node.meta.get("example_value")
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else ""
