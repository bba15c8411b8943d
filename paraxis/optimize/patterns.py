"""What passes that put kernels in place look for: small questions about nodes, and rotations by position."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..graph.nodes import argument

aten = torch.ops.aten
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Those that the kernels take."""


def value_of(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val", node.meta.get("example_value")) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    value = value_of(node)
    return None if value is None else value.dtype


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def bare(node: Any) -> Any:
    """The node before conversions of its dtype."""
    while is_call(node, aten.to.dtype, aten._to_copy.default):
        node = node.args[0]
    return node


def both(node: Any, target: Any) -> list[tuple[Any, Any]]:
    """The arguments of a commutative operator in both orders; none if the node is another operator."""
    if not is_call(node, target) or len(node.args) != 2 or node.kwargs:
        return []
    return [(node.args[0], node.args[1]), (node.args[1], node.args[0])]


def base_of(node: Any) -> Any:
    """The same numbers without dimensions that were added: one tensor for all layers rather than one for each."""
    while is_call(node, aten.unsqueeze.default, aten.expand.default, aten.view.default, aten.reshape.default):
        value, source = value_of(node), value_of(node.args[0])
        if value is None or source is None or source.dim() < 2 or value.numel() != source.numel():
            break
        if value.shape[0] != source.shape[0] or value.shape[-1] != source.shape[-1]:
            break
        node = node.args[0]
    return node


class Turn(NamedTuple):
    """``x * cos + rotate_half(x) * sin``."""

    x: Node
    cos: Node
    sin: Node


def turn_of(node: Any, rows: int, features: int) -> Turn | None:
    """The parts of queries or keys that are turned by their positions."""
    for direct, crossed in both(node, aten.add.Tensor):
        for x, cos in both(direct, aten.mul.Tensor):
            for half, sin in both(crossed, aten.mul.Tensor):
                if not _is_half_turn(half, x, features):
                    continue
                if all(_per_token(by, x, rows, features) for by in (cos, sin)):
                    return Turn(x, cos, sin)
    return None


def _is_half_turn(node: Any, x: Any, features: int) -> bool:
    """``cat([-x[..., half:], x[..., :half]], -1)``"""
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2 or argument(node, 1, "dim", 0) not in (-1, 3):
        return False
    negative, low = node.args[0]
    high: Any = negative.args[0] if is_call(negative, aten.neg.default) else None
    if not is_call(low, aten.slice.Tensor) or not is_call(high, aten.slice.Tensor):
        return False
    bounds = [(s.args[0], *(argument(s, i, n, d) for i, n, d in _SLICE)) for s in (low, high)]
    half = features // 2
    return (
        all(b[0] is x and b[1] in (-1, 3) and b[4] == 1 for b in bounds)
        and bounds[0][2] in (None, 0)
        and bounds[0][3] == half
        and bounds[1][2] == half
        and (bounds[1][3] is None or bounds[1][3] >= features)
    )


_SLICE = ((1, "dim", 0), (2, "start", None), (3, "end", None), (4, "step", 1))


def _per_token(by: Any, x: Any, rows: int, features: int) -> bool:
    """Whether a factor is the same for all heads, with a row for each token."""
    value, of = value_of(by), value_of(x)
    return (
        value is not None
        and of is not None
        and value.dtype == of.dtype
        and value.dim() == 4
        and tuple(value.shape[1:]) == (1, rows, features)
        and value.shape[0] in (1, of.shape[0])
    )


def unrepeated(node: Any) -> tuple[Node, int] | None:
    """What ``x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)`` repeats, and how often."""
    if not isinstance(node, Node) or node.target not in (aten.reshape.default, aten.view.default):
        return None
    expand: Any = node.args[0]
    if not isinstance(expand, Node) or expand.target is not aten.expand.default:
        return None
    unsqueeze, sizes = expand.args[0], expand.args[1]  # type: Any, Any
    if not isinstance(unsqueeze, Node) or unsqueeze.target is not aten.unsqueeze.default or unsqueeze.args[1] != 2:
        return None
    if len(sizes) != 5 or not isinstance(sizes[2], int) or len(node.args[1]) != 4:  # type: ignore[arg-type]
        return None
    source = unsqueeze.args[0]
    heads, joined = (x.meta.get("val") if isinstance(x, Node) else None for x in (source, node))
    if isinstance(heads, torch.Tensor) and isinstance(joined, torch.Tensor) and joined.dim() == heads.dim() == 4:
        if joined.shape[1] != heads.shape[1] * sizes[2]:
            return None
    return (source, sizes[2]) if isinstance(source, Node) else None
