"""Small graphs for tests of rewrites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx


def trace(function: Callable[..., Any], inputs: Sequence[Any], **options: Any) -> GraphModule:
    """The operators that a function of these inputs runs, before decompositions unless ``pre_dispatch`` is False."""
    return make_fx(lambda *args: function(*args), **{"pre_dispatch": True, **options})(*inputs)


def targets(module: GraphModule) -> list[Any]:
    """The functions and operators that a graph calls, in order."""
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def assert_same_results(
    module: Callable[..., Any], function: Callable[..., Any], inputs: Sequence[Any], **tolerances: float
) -> None:
    """A rewritten graph gives what the function does, and writes what the function writes into its inputs."""
    ours, theirs = ([x.clone() if isinstance(x, torch.Tensor) else x for x in inputs] for _ in range(2))
    torch.testing.assert_close(module(*ours), function(*theirs), **tolerances)
    torch.testing.assert_close(ours, theirs, **tolerances)


def call_of(module: GraphModule, target: Any, index: int = 0) -> Node:
    """The first call of a function or operator in a graph, or another one by its index."""
    return module.graph.find_nodes(op="call_function", target=target)[index]


def set_arg(node: Node, position: int, value: Any) -> None:
    """Change an argument of a call."""
    node.args = (*node.args[:position], value, *node.args[position + 1 :])


def pretend(node: Node, shape: Sequence[Any] | None = None, dtype: torch.dtype | None = None) -> None:
    """Let a node have another shape or dtype, for rewrites that look at it."""
    value = node.meta["val"]
    shape = value.shape if shape is None else shape
    node.meta["val"] = torch.empty(shape, dtype=dtype or value.dtype, device="meta")
