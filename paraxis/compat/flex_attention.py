"""Private APIs of torch's FlexAttention: attention whose scores and mask are Python functions.

Dynamo captures it as one higher-order operator with two subgraphs: ``score_mod`` changes the score of a query and a
key, ``mask_mod`` says whether the query sees the key. :class:`FlexAttention` is one such call. Seen on torch 2.13.

The operator takes seconds to import, so every import is inside of a function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from .torch import pytree

__all__ = ["FLEX_ATTENTION", "FlexAttention", "differentiate_on_cpu"]

FLEX_ATTENTION = "flex_attention"
"""The name of the higher-order operator."""

_MORE = ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")
"""The options that ask for the second and third result."""

_MODULE = "torch.nn.attention.flex_attention"


class FlexAttention:
    """A call of FlexAttention as a function of its tensors: the node of an ATen graph, and an operator with a rule.

    It is called with the leaves of (query, key, value, block mask without its function, scale, kernel options, what the
    score function reads, what the mask function reads). Its results are those of torch's operator: output, logsumexp
    and largest scores.

    On a CPU it computes all scores, which has a gradient; torch's kernel for CPUs has none, and does not take all
    functions. Elsewhere torch's kernel runs, compiled at the first call.

    Attributes:
        score_mod: The graph of ``score_mod(score, batch, head, query, key, *buffers)``.
        mask_mod: The graph of ``mask_mod(batch, head, query, key, *buffers)``.
        block_tensors: How many of the tensors after query, key and value are of the block mask.
        first_head: The head that both functions see as head 0 is this one.
    """

    def __init__(
        self, score_mod: GraphModule, mask_mod: GraphModule, structure: Any, block_tensors: int, first_head: int = 0
    ) -> None:
        self.score_mod, self.mask_mod, self.first_head = _shared(score_mod), _shared(mask_mod), first_head
        self._structure, self.block_tensors = structure, block_tensors
        self.__name__ = self.__qualname__ = FLEX_ATTENTION
        self.__module__ = "paraxis"

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[FlexAttention, list[Any]]:
        """The captured call of torch's operator as one of these, and what to call it with."""
        names = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        buffers = (*args[len(names) :], (), ())
        score_buffers = named.get("score_mod_other_buffers", buffers[0])
        mask_buffers = named.get("mask_mod_other_buffers", buffers[1])
        *blocks, mask_mod = named["block_mask"]
        rest = tuple(blocks), named["scale"], named["kernel_options"], score_buffers, mask_buffers
        leaves, structure = pytree.tree_flatten((named["query"], named["key"], named["value"], *rest))
        block_tensors = sum(isinstance(x, torch.Tensor) for x in blocks)
        return FlexAttention(named["score_mod"], mask_mod, structure, block_tensors), leaves

    @property
    def reads_head(self) -> bool:
        """Whether the functions look at the index of the head: then a rank must know which heads it has."""
        return _reads(self.score_mod, 2) or _reads(self.mask_mod, 1)

    def from_head(self, first: int) -> FlexAttention:
        """The same on tensors whose head 0 is this one."""
        if not self.reads_head:
            return self
        return FlexAttention(
            self.score_mod, self.mask_mod, self._structure, self.block_tensors, self.first_head + first
        )

    def __call__(self, *leaves: Any) -> Any:
        """Run it."""
        query = leaves[0]
        if query.device.type == "cpu":
            return self._all_scores(*leaves)
        plain = type(query) is torch.Tensor and not torch.compiler.is_compiling()
        return _compiled()(self, *leaves) if plain else self.captured(*leaves)

    def captured(self, *leaves: Any) -> Any:
        """Call torch's operator, which a tracer records; otherwise it computes all scores."""
        from torch._higher_order_ops.flex_attention import flex_attention

        return flex_attention(*self._arguments(leaves))

    def _all_scores(self, *leaves: Any) -> Any:
        """The same in plain operators, which a compiler can fuse, and which have a gradient."""
        from torch._higher_order_ops.flex_attention import math_attention

        return math_attention(*self._arguments(leaves))

    def _arguments(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of torch's operator."""
        query, key, value, blocks, scale, options, scores, masks = pytree.tree_unflatten(leaves, self._structure)
        first, score_mod, mask_mod = self.first_head, self.score_mod, self.mask_mod

        def score(x: Any, batch: Any, head: Any, q: Any, k: Any, *buffers: Any) -> Any:
            return score_mod(x, batch, head + first if first else head, q, k, *buffers)

        def mask(batch: Any, head: Any, q: Any, k: Any, *buffers: Any) -> Any:
            return mask_mod(batch, head + first if first else head, q, k, *buffers)

        return query, key, value, score, (*blocks, mask), scale, options, tuple(scores), tuple(masks)


@functools.lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    """Calls a :class:`FlexAttention` through torch's compiler, which has the kernel."""

    from torch._higher_order_ops.flex_attention import flex_attention as operator

    def flex_attention(call: FlexAttention, *leaves: Any) -> Any:
        query, key, value, blocks, scale, options, scores, masks = pytree.tree_unflatten(leaves, call._structure)
        first, score_mod, mask_mod = call.first_head, call.score_mod, call.mask_mod

        # What they read must be captured by these functions: the compiler takes no buffers as arguments.
        def score(x: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
            return score_mod(x, batch, head + first, q, k, *scores)

        def mask(batch: Any, head: Any, q: Any, k: Any) -> Any:
            return mask_mod(batch, head + first, q, k, *masks)

        output, *more = operator(query, key, value, score, (*blocks, mask), scale, options)
        # The kernel computes the others only where the options say so, and has no such result elsewhere.
        return output, *(x if options.get(name, True) else None for x, name in zip(more, _MORE))

    return torch.compile(flex_attention)


def _reads(graph_module: GraphModule, position: int) -> bool:
    """Whether a graph uses the argument at this position."""
    return bool(graph_module.graph.find_nodes(op="placeholder")[position].users)


_graphs: dict[str, GraphModule] = {}


def _shared(graph_module: GraphModule) -> GraphModule:
    """One graph for all with the same code: the layers of a model have equal ones, and are compiled once."""
    if graph_module.graph.find_nodes(op="get_attr") or graph_module.graph.find_nodes(op="call_module"):
        return graph_module
    return _graphs.setdefault(graph_module.code, graph_module)


# -- tracing -------------------------------------------------------------------------------------------------------


def differentiate_on_cpu(applies: Callable[[], bool]) -> None:
    """Where ``applies()``, accept tensors on a CPU that require gradients, for which torch has no kernel."""
    module = sys.modules.get(_MODULE)
    if module is None or hasattr(module._validate_device, "_checked"):
        return
    check = module._validate_device

    def validate_device(query: Any, key: Any, value: Any) -> None:
        if query.device.type != "cpu" or not applies():
            check(query, key, value)

    validate_device._checked = check  # type: ignore[attr-defined]
    module._validate_device = validate_device  # type: ignore[attr-defined]
