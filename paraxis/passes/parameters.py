"""Finding the parameters among the inputs of a captured graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ..compat.dynamo import parameter_of
from ..context import ParallelExecutionCtx
from ..placement import Placement
from ..tensor.parameter_meta import ParameterMeta
from ..tensor.sharded_tensor import ShardedTensor, ShardSpec


@dataclass(eq=False)
class ParameterInput:
    """A captured node that is a parameter."""

    node: Node
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    meta: ParameterMeta | None
    """Its metadata if it is a sharded parameter; a plain tensor has none."""

    @property
    def placement(self) -> Placement | None:
        """Where it is sharded; None if it is not placed yet, or a plain tensor."""
        return self.meta.placement if self.meta is not None else None


def find_parameters(graph_module: GraphModule, ctx: ParallelExecutionCtx) -> list[ParameterInput]:
    """The parameters of a captured graph, whether they are placeholders or attributes."""
    found = []
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    real = ctx.example_inputs if len(ctx.example_inputs or []) == len(placeholders) else [None] * len(placeholders)
    for node, example in zip(placeholders, real, strict=True):
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, torch.Tensor) and _is_parameter(node, value, example):
            found.append(_input(node, _known(example, ctx) or _name(node, value), value))
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = _attribute(graph_module, str(node.target))
            if isinstance(value, nn.Parameter):
                found.append(_input(node, str(node.target), value))
    return found


def sharded_inputs(graph_module: GraphModule) -> dict[Node, Placement]:
    """The placements of placeholders that are sharded and no parameters: KV caches of an earlier call."""
    result = {}
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        if node.op == "placeholder" and isinstance(value, ShardedTensor) and isinstance(value.spec, ShardSpec):
            result[node] = value.spec.placement
    return result


def _is_parameter(node: Node, value: torch.Tensor, example: Any) -> bool:
    if isinstance(value, ShardedTensor):
        return isinstance(value.spec, ParameterMeta)
    return (
        isinstance(example, nn.Parameter)
        or isinstance(value, nn.Parameter)
        or parameter_of(str(node.target)) is not None
    )


def _input(node: Node, name: str, value: torch.Tensor) -> ParameterInput:
    meta = value.spec if isinstance(value, ShardedTensor) and isinstance(value.spec, ParameterMeta) else None
    return ParameterInput(node, name, tuple(value.shape), value.dtype, value.requires_grad, meta)


def _known(example: Any, ctx: ParallelExecutionCtx) -> str | None:
    """The name of a plain parameter that was added since the plan was made."""
    if not isinstance(example, nn.Parameter) or isinstance(example, ShardedTensor):
        return None
    return next((name for name, parameter in ctx.param_cache.items() if parameter is example), None)


def _name(node: Node, value: torch.Tensor) -> str:
    """The qualified name: from the metadata, or from the placeholder, which Dynamo names after its source."""
    if isinstance(value, ShardedTensor) and isinstance(value.spec, ParameterMeta) and value.spec.name:
        return value.spec.name
    return parameter_of(str(node.target)) or str(node.target)


def _attribute(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part, None)
    return root
