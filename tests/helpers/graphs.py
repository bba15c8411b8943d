"""Small graphs for tests of rewrites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
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
