"""FlexAttention inside a model: one node of the ATen graph, with the graphs of its score and mask functions."""

from __future__ import annotations

from typing import Any

from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree

from ..compat.flex_attention import FlexAttention
from ..compat.torch import pytree


def trace_flex_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator while tracing, and leave one node for it in the graph."""
    function, leaves = FlexAttention.of(args, kwargs)
    mode: Any = get_proxy_mode()
    with disable_proxy_modes_tracing():
        result = function.captured(*leaves)
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, tuple(leaves))
    proxy = mode.tracer.create_proxy("call_function", function, proxies, {}, name="flex_attention")
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
