"""Arguments, shapes and modules of nodes, and cleaning up after a rewrite."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.fx import GraphModule, Node


def argument(node: Node, position: int, name: str, default: Any) -> Any:
    """An argument by position or name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def shape_of(node: Node) -> tuple[Any, ...] | None:
    """The shape of the fake tensor that a node stands for."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def is_impure(node: Node) -> bool:
    """Whether a node must stay even if no node uses it: also a write into an input that is not an operator."""
    return bool(node.is_impure() or node.meta.get("writes"))


def tidied(module: GraphModule, count: int) -> int:
    """Remove dead code after a rewrite that replaced something ``count`` times; returns ``count``."""
    if count:
        module.graph.eliminate_dead_code(is_impure_node=is_impure)
        module.recompile()
    return count


def module_of(node: Node) -> str:
    """The name of the module that a node came from, as in ``named_modules``."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"^L\[[^]]*\]\.?", "", str(stack[-1][0])) if stack else ""


def captured_module_of(node: Node | None) -> str:
    """The module of the captured node that a node of the ATen graph came from (``meta["origin"]``)."""
    origin = node.meta.get("origin") if node is not None else None
    return module_of(origin) if origin is not None else ""
