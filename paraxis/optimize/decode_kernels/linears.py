"""Linear layers on one row (GEMV), with the RMS norm before and the SiLU gate after them, as one kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ...graph.match import NODE, Capture, Op, Via, Where, match, matches
from ..patterns import KERNEL_DTYPES, dtype_of, is_call, is_static, tensor_of, without_casts

aten = torch.ops.aten
MAX_ROW_FEATURES = 16384
"""A program of the GEMV kernel holds an entire row: it takes at most that many features."""
MAX_WEIGHTS = 3
"""Linear layers on the same row that one kernel computes, such as query, key and value."""

_X = Via(without_casts, Capture("x"))
_KEEPDIM = Where(lambda keepdim: keepdim is True)
_MEAN_SQUARE = Op(aten.mean.dim, Op(aten.pow.Tensor_Scalar, _X, 2), [-1], _KEEPDIM)
_EPS = Capture("eps", Where(lambda value: isinstance(value, (int, float))))
_INVERSE_RMS = Where(
    lambda node: dtype_of(node) == torch.float32,
    Op(aten.rsqrt.default, Op(aten.add.Tensor, _MEAN_SQUARE, _EPS, commutes=True)),
)
_NORMALIZED = Op(aten.mul.Tensor, Capture("float_x", _X), _INVERSE_RMS, commutes=True)
_RMS_NORM = Op(
    aten.mul.Tensor,
    Capture("weight"),
    Capture("normalized", Via(without_casts, _NORMALIZED)),
    commutes=True,
)
"""``weight * cast(cast(x) * rsqrt(mean(cast(x) ** 2, -1, keepdim=True) + eps))``"""

_SILU_GATE = Op(
    aten.mul.Tensor,
    Op(aten.silu.default, Capture("gate"), users=1),
    Capture("up"),
    commutes=True,
)
"""``silu(gate) * up``"""


class _RMSNorm(NamedTuple):
    """``weight * (x * rsqrt(mean(x ** 2) + eps))``, with ``x`` in float32 inside."""

    x: Node
    weight: Node
    eps: float


class Gate(NamedTuple):
    """``product = silu(gate) * up`` of two linear layers."""

    gate: Node
    up: Node
    product: Node


def replace_linears(graph: Graph, inputs: dict[Any, Any]) -> int:
    """Replace linear layers on one row by kernels, several on the same row by one; how many kernels."""
    by_row: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        if _is_gemv(node, inputs):
            by_row.setdefault(node.args[0], []).append(node)
    count = 0
    for nodes in by_row.values():
        for group in groups_of(nodes):
            _replace_group(graph, group, inputs)
            count += 1
    return count


def groups_of(nodes: list[Node]) -> Iterator[list[Node]]:
    """Linear layers on the same row, as many as one kernel takes: all with a bias, or all without."""
    biased = [node for node in nodes if bias_of(node) is not None]
    for group in (biased, [node for node in nodes if node not in biased]):
        for start in range(0, len(group), MAX_WEIGHTS):
            yield group[start : start + MAX_WEIGHTS]


def bias_of(node: Node) -> Any:
    """The bias of a linear layer; None without."""
    return node.args[2] if len(node.args) > 2 else None


def _is_gemv(node: Node, inputs: dict[Any, Any]) -> bool:
    """Whether the kernel computes a linear layer: on one row, with parameters that are inputs of the program."""
    row, weight = tensor_of(node.args[0]), inputs.get(node.args[1])
    if row is None or not isinstance(weight, torch.Tensor) or not is_static(row) or node.kwargs:
        return False
    if prod(row.shape[:-1]) != 1 or row.dtype not in KERNEL_DTYPES:
        return False
    return has_own_parameters(node, inputs, row.dtype) and _is_kernel_weight(weight)


def has_own_parameters(node: Node, inputs: dict[Any, Any], dtype: torch.dtype) -> bool:
    """Whether weight and bias of a linear layer are inputs of the program, contiguous and of this dtype."""
    parameters = [inputs.get(arg) for arg in node.args[1:] if arg is not None]
    return all(isinstance(p, torch.Tensor) and p.dtype == dtype and p.is_contiguous() for p in parameters)


def _is_kernel_weight(weight: torch.Tensor) -> bool:
    """Whether the GEMV kernel takes a weight of this shape."""
    return (
        weight.dim() == 2 and weight.shape[1] % 16 == 0 and weight.shape[1] <= MAX_ROW_FEATURES and weight.shape[0] > 0
    )


def _replace_group(graph: Graph, linears: list[Node], inputs: dict[Any, Any]) -> None:
    """Compute linear layers on the same row by one kernel."""

    def arguments(nodes: list[Node]) -> tuple[Any, ...]:
        return [node.args[1] for node in nodes], [bias for node in nodes if (bias := bias_of(node)) is not None]

    sizes = {node: inputs[node.args[1]].shape[0] for node in linears}
    operators = torch.ops.paraxis.gemv.default, torch.ops.paraxis.rmsnorm_gemv.default
    fuse(graph, linears, sizes, inputs[linears[0].args[1]].shape[1], inputs, operators, arguments)


def fuse(
    graph: Graph,
    linears: list[Node],
    sizes: dict[Node, int],
    features: int,
    inputs: dict[Any, Any],
    operators: tuple[Any, Any],
    arguments: Callable[[list[Node]], tuple[Any, ...]],
) -> None:
    """Compute linear layers on the same row by one kernel, together with the norm before and the gate after them.

    Args:
        graph: The program.
        linears: The layers.
        sizes: How many features each has.
        features: How many features the row has.
        inputs: The inputs of the program.
        operators: The kernel, and the one with a norm.
        arguments: Those of the kernel between the row and whether there is a gate, for some of the layers.
    """
    row = linears[0].args[0]
    norm = _rms_norm_of(_unsliced(row), inputs, features)
    residual = _residual_sum_of(norm.x) if norm is not None else None
    gate = gate_of(linears)
    if gate is not None:
        linears = [gate.gate, gate.up]
    # The kernel also returns the residual sum, which others may use before the linear layers.
    first = norm.x.next if norm is not None and residual is not None else min(linears)
    with graph.inserting_before(first):
        if norm is None:
            result = graph.call_function(operators[0], (row, *arguments(linears), gate is not None))
        else:
            terms = (norm.x, None) if residual is None else residual
            args = (*terms, norm.weight, norm.eps, *arguments(linears), gate is not None)
            results = graph.call_function(operators[1], args)
            result = graph.call_function(operator.getitem, (results, 0))
            if residual is not None:
                total = graph.call_function(operator.getitem, (results, 1))
        one = gate is not None or len(linears) == 1
        outputs = [result] if one else split_result(graph, result, [sizes[node] for node in linears])
    if norm is not None and residual is not None:
        total.meta["val"] = norm.x.meta.get("val")
        norm.x.replace_all_uses_with(total)
    for node, output in zip(linears if gate is None else [gate.product], outputs, strict=True):
        output.meta["val"] = node.meta.get("val")
        node.replace_all_uses_with(output)


def split_result(graph: Graph, node: Node, sizes: list[int]) -> list[Node]:
    """Slices of these sizes along the last dimension."""
    slices, start = [], 0
    for size in sizes:
        slices.append(graph.call_function(aten.slice.Tensor, (node, -1, start, start + size)))
        start += size
    return slices


def _unsliced(node: Any) -> Any:
    """The tensor that a slice takes all of; any other node itself."""
    if is_call(node, aten.slice.Tensor):
        value, source = tensor_of(node), tensor_of(node.args[0])
        if value is not None and source is not None and value.shape == source.shape:
            return node.args[0]
    return node


def _rms_norm_of(node: Any, inputs: dict[Any, Any], features: int) -> _RMSNorm | None:
    """The RMS norm of a row whose weight is an input of the program."""
    for found in matches(_RMS_NORM, node):
        weight, x = inputs.get(found["weight"]), found["x"]
        if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != (features,) or not weight.is_contiguous():
            continue
        if dtype_of(found["normalized"]) == weight.dtype == dtype_of(x) and dtype_of(found["float_x"]) == torch.float32:
            return _RMSNorm(x, found["weight"], float(found["eps"]))
    return None


_SUM = Op(aten.add.Tensor, Capture("a", NODE), Capture("b", NODE))


def _residual_sum_of(node: Node) -> tuple[Node, Node] | None:
    """The two rows that a row is the sum of, neither broadcast nor cast."""
    found = match(_SUM, node)
    if found is None:
        return None
    terms = (found["a"], found["b"])
    total, *values = (tensor_of(each) for each in (node, *terms))
    if total is None or any(v is None or v.shape != total.shape or v.dtype != total.dtype for v in values):
        return None
    return terms


def gate_of(linears: list[Node]) -> Gate | None:
    """The gate of two linear layers, where nothing else uses their results."""
    if len(linears) != 2 or any(len(node.users) != 1 for node in linears):
        return None
    for gate, up in (linears, linears[::-1]):
        product = next(iter(up.users))
        if match(_SILU_GATE, product, {"gate": gate, "up": up}) is not None:
            return Gate(gate, up, product)
    return None
