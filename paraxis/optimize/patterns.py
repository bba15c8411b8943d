"""Patterns and predicates that several rewrites share: attention, rotary embeddings, repeated KV heads, positions.

A rewrite replaces only what it recognizes completely. What a kernel takes is a predicate here, so that a reader sees
every condition by its name, and a test can violate it alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..graph.match import ANY, FALSY, NODE, AnyOf, Arg, Capture, Op, Where, match, matches
from ..graph.nodes import shape_of

aten = torch.ops.aten

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Those that the Triton kernels take."""
CREATION_OPTIONS = ("dtype", "layout", "device", "pin_memory")
"""Keyword arguments of operators that create tensors."""
_END = 9223372036854775807
"""The end of a slice without one."""


# -- nodes -----------------------------------------------------------------------------------------------------------


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that a node stands for."""
    value = node.meta.get("val", node.meta.get("example_value")) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_slice_of_all(node: Any) -> bool:
    """Whether a node is ``x[:]``, a view of all of ``x``."""
    if not is_call(node, aten.slice.Tensor) or node.kwargs:
        return False
    return tuple(node.args[2:]) in ((), (0,), (0, _END), (None, _END), (None, None))


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of a node; None if it is no tensor."""
    value = tensor_of(node)
    return None if value is None else value.dtype


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these operators."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_input(node: Any) -> bool:
    """Whether a node is an input of the program."""
    return isinstance(node, Node) and node.op == "placeholder"


def is_static(*tensors: torch.Tensor) -> bool:
    """Whether no size is symbolic."""
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


def is_position(node: Any) -> bool:
    """Whether a node is one position in a KV cache: an int64 tensor of one element."""
    value = tensor_of(node)
    return value is not None and value.numel() == 1 and value.dtype == torch.int64


def is_kernel_head_size(features: int) -> bool:
    """Whether the Triton kernels take heads with that many features: a power of two."""
    return features & (features - 1) == 0 and 16 <= features <= 256


def without_casts(node: Any) -> Any:
    """The node before casts to other dtypes."""
    while is_call(node, aten.to.dtype, aten._to_copy.default):
        node = node.args[0]
    return node


def without_added_dims(node: Any) -> Any:
    """The same elements before dimensions of size one were added: one tensor for all layers, not one for each."""
    while is_call(node, aten.unsqueeze.default, aten.expand.default, aten.view.default, aten.reshape.default):
        value, source = tensor_of(node), tensor_of(node.args[0])
        if value is None or source is None or source.dim() < 2 or value.numel() != source.numel():
            break
        if value.shape[0] != source.shape[0] or value.shape[-1] != source.shape[-1]:
            break
        node = node.args[0]
    return node


# -- attention -------------------------------------------------------------------------------------------------------

ATTENTION = Op(
    aten.scaled_dot_product_attention.default,
    Capture("query"),
    Capture("keys"),
    Capture("values"),
    Arg("attn_mask", Capture("mask")),
    Arg("dropout_p", FALSY, 0.0),
    Arg("is_causal", Capture("is_causal"), False),
    Arg("scale", Capture("scale")),
    ignore=("enable_gqa",),
)


class Attention(NamedTuple):
    """The arguments of an attention without dropout."""

    query: Any
    keys: Any
    values: Any
    mask: Any
    is_causal: Any
    scale: Any


def attention_of(node: Node) -> Attention | None:
    """The arguments of an attention; None if it has dropout, or if the node is another operator."""
    found = match(ATTENTION, node)
    return None if found is None else Attention(**found)


def count_queries(node: Node) -> int | None:
    """The queries per sequence of an attention; None if their number is dynamic or the result has not four dims."""
    shape = shape_of(node)
    return shape[2] if shape is not None and len(shape) == 4 and isinstance(shape[2], int) else None


# -- key/value heads that are repeated for several query heads -------------------------------------------------------

_REPEATED_HEADS = Op(
    (aten.reshape.default, aten.view.default),
    Op(
        aten.expand.default,
        Op(aten.unsqueeze.default, Capture("source", NODE), 2),
        [ANY, ANY, Capture("repeats", Where(lambda size: isinstance(size, int))), ANY, ANY],
        ignore=("implicit",),
    ),
    [ANY, ANY, ANY, ANY],
)
"""``x[:, :, None].expand(batch, heads, repeats, length, size).reshape(batch, heads * repeats, length, size)``"""


class RepeatedHeads(NamedTuple):
    """Heads that are repeated, each ``repeats`` times in a row."""

    source: Node
    repeats: int


def repeated_heads_of(node: Any) -> RepeatedHeads | None:
    """The heads that a node repeats; None if it repeats none."""
    found = match(_REPEATED_HEADS, node)
    if found is None:
        return None
    heads, repeated = shape_of(found["source"]), shape_of(node)
    if heads is not None and repeated is not None and len(heads) == len(repeated) == 4:
        if repeated[1] != heads[1] * found["repeats"]:
            return None
    return RepeatedHeads(found["source"], found["repeats"])


def without_repeated_heads(node: Any) -> Any:
    """The heads before they were repeated; a node that repeats none itself."""
    found = repeated_heads_of(node)
    return node if found is None else found.source


# -- rotary embedding ------------------------------------------------------------------------------------------------

_LAST_OF_FOUR = Where(lambda dim: dim in (-1, 3))


def _half(start: Any, end: Any) -> Op:
    """A slice of the features of ``x``."""
    return Op(
        aten.slice.Tensor,
        Capture("x"),
        Arg("dim", _LAST_OF_FOUR, 0),
        Arg("start", start),
        Arg("end", end),
        Arg("step", 1, 1),
    )


_ROTATE_HALF = Op(
    aten.cat.default,
    [Op(aten.neg.default, _half(Capture("half"), Capture("end"))), _half(AnyOf(None, 0), Capture("half"))],
    Arg("dim", _LAST_OF_FOUR, 0),
)
"""``cat([-x[..., half:], x[..., :half]], -1)``"""

_ROTARY = Op(
    aten.add.Tensor,
    Op(aten.mul.Tensor, Capture("x"), Capture("cos"), commutes=True),
    Op(aten.mul.Tensor, _ROTATE_HALF, Capture("sin"), commutes=True),
    commutes=True,
)


class Rotary(NamedTuple):
    """A rotary embedding: ``x * cos + rotate_half(x) * sin``."""

    x: Node
    cos: Node
    sin: Node

    def has_angles_of(self, other: Rotary) -> bool:
        """Whether both are rotated by the same angles."""
        return self.cos is other.cos and self.sin is other.sin


def rotary_of(node: Any, rows: int, features: int) -> Rotary | None:
    """The rotary embedding of queries or keys, over all of their features and with angles for each of the rows."""
    for found in matches(_ROTARY, node):
        if found["half"] != features // 2 or not _reaches_end(found["end"], features):
            continue
        x, cos, sin = found["x"], found["cos"], found["sin"]
        if all(_is_per_token(factor, x, rows, features) for factor in (cos, sin)):
            return Rotary(x, cos, sin)
    return None


def _reaches_end(end: Any, size: int) -> bool:
    """Whether a slice that ends there takes all up to the last element."""
    return end is None or (isinstance(end, int) and end >= size)


def _is_per_token(factor: Any, x: Any, rows: int, features: int) -> bool:
    """Whether a factor has a row for each token, the same for all heads."""
    value, states = tensor_of(factor), tensor_of(x)
    return (
        value is not None
        and states is not None
        and value.dtype == states.dtype
        and value.dim() == 4
        and tuple(value.shape[1:]) == (1, rows, features)
        and value.shape[0] in (1, states.shape[0])
    )


# -- positions -------------------------------------------------------------------------------------------------------


def range_of(count: Any) -> AnyOf:
    """The pattern of ``arange(count)``."""
    return AnyOf(
        Op(aten.arange.default, count, ignore=CREATION_OPTIONS),
        Op((aten.arange.start, aten.arange.start_step), 0, count, Arg("step", 1, 1), ignore=CREATION_OPTIONS),
    )
