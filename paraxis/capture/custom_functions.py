"""``torch.autograd.Function`` inside a model.

It is captured as an operator with two subgraphs, forward and backward. Its backward is the author's and need not be the
derivative of its forward, so the two stay together: the ATen graph has one node for it. It runs on shards only if
everything inside is elementwise; otherwise its inputs are replicated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)

from ..compat.torch import OpOverload, operator_name, pytree

_COPIES = {"aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::detach", "aten::alias"}


class CustomFunction:
    """A captured autograd function as one callable of its tensor arguments."""

    def __init__(self, target: Any, forward: GraphModule, backward: GraphModule, kwargs: dict[str, Any]) -> None:
        self.target, self.forward, self.backward, self.kwargs = target, forward, backward, kwargs
        self.pointwise = _is_pointwise(forward) and _is_pointwise(backward)
        self.__name__ = self.__qualname__ = "custom_function"
        self.__module__ = "paraxis"

    def __call__(self, *args: Any) -> Any:
        return self.target(self.forward, self.backward, *args, **self.kwargs)


def trace_custom_function(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function while tracing, and leave one node for it in the graph."""
    forward, backward, *rest = args
    function = CustomFunction(target, forward, backward, kwargs)
    mode: Any = get_proxy_mode()
    with disable_proxy_modes_tracing():
        result = function(*rest)
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, tuple(rest))
    proxy = mode.tracer.create_proxy("call_function", function, proxies, {}, name="custom_function")
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


def _is_pointwise(body: GraphModule) -> bool:
    """Whether a subgraph consists of elementwise operators on tensors of one shape."""
    values = [n.meta.get("example_value") for n in body.graph.nodes if n.op == "placeholder"]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if not tensors or len(tensors) < len(values) or any(t.shape != tensors[0].shape for t in tensors):
        return False
    with disable_proxy_modes_tracing(), tensors[0].fake_mode:  # type: ignore[attr-defined]
        traced = make_fx(body, _allow_non_fake_inputs=True)(*values)
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            return False
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if torch.Tag.pointwise not in node.target.tags and operator_name(node.target) not in _COPIES:
            return False
    return True
