"""Matmuls and the linear layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..placement import PARTIAL, REPLICATE, Layout, Placement, Shard
from .base import Call, InputPlacement, Strategy, Tensor, is_one, layouts_on, same_size
from .registry import builtin_rule

aten = torch.ops.aten


@builtin_rule(aten.linear.default, samples="matmul", free=True)
def linear(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """``x @ w.T + b``: column-parallel, row-parallel, or the rows of x sharded and w replicated."""
    bias = len(call.inputs) > 2
    yield from _linear(call, placements, x=0, w=1, w_in=1, w_out=0, bias=2 if bias else None)


@builtin_rule(aten.addmm.default, samples="matmul", free=True)
def addmm(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """``b + x @ w``: a linear layer that stores its weight transposed."""
    if call.kwargs.get("beta", 1) != 1 or call.kwargs.get("alpha", 1) != 1 or call.inputs[0].ndim != 1:
        return
    yield from _linear(call, placements, x=1, w=2, w_in=0, w_out=1, bias=0)


def _linear(
    call: Call, placements: Sequence[InputPlacement], x: int, w: int, w_in: int, w_out: int, bias: int | None
) -> Iterable[Strategy]:
    """The strategies of a linear layer: the positions of its inputs, and the dimensions of its weight."""
    if call.inputs[w].ndim != 2:
        return
    last = call.inputs[x].ndim - 1
    out_last = call.out.ndim - 1

    def strategy(px: Placement, pw: Placement, pb: Placement, out: Placement, kind: str = "") -> Strategy:
        inputs: list[Placement] = [REPLICATE] * len(call.inputs)
        inputs[x], inputs[w] = px, pw
        if bias is not None:
            inputs[bias] = pb
        return Strategy(tuple(inputs), (out,), kind=kind)

    for layout in layouts_on(call, placements, w, w_out):
        column, vector = Shard.of(w_out, layout), Shard.of(0, layout)
        yield strategy(REPLICATE, column, vector, Shard.of(out_last, layout), "column")
    for layout in [*layouts_on(call, placements, x, last), *layouts_on(call, placements, w, w_in)]:
        if layout.has_copies:  # what is on two ranks would be summed twice
            continue
        yield strategy(Shard.of(last, layout), Shard.of(w_in, layout), PARTIAL, PARTIAL, "row")
    px = placements[x]
    if isinstance(px, Shard) and last not in px.dims:
        yield strategy(px, REPLICATE, REPLICATE, px)


@builtin_rule(aten.matmul.default, aten.mm.default, aten.bmm.default, samples="matmul")
def matmul(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Batch dimensions, rows of the left, columns of the right, or the contracted dimension (partial results)."""
    left, right = call.inputs
    if left.ndim < 1 or right.ndim < 2 or (left.ndim == 1 and right.ndim > 2):
        return
    n = call.out.ndim
    for side, placement in enumerate(placements):
        if not isinstance(placement, Shard) or len(placement.layouts) != 1:
            continue
        dim, layout = placement.layouts[0]
        yield from _matmul_dim(left, right, n, side, dim, layout)


def _matmul_dim(left: Tensor, right: Tensor, n: int, side: int, dim: int, layout: Layout) -> Iterable[Strategy]:
    """The strategy of a matmul of which one side is sharded on one dimension."""
    contract = (left.ndim - 1, right.ndim - 2)
    if dim == contract[side]:
        if layout.has_copies:  # what is on two ranks would be summed twice
            return
        inputs = (Shard.of(contract[0], layout), Shard.of(contract[1], layout))
        yield Strategy(inputs, (PARTIAL,), kind="row")
    elif side == 0 and dim == left.ndim - 2:
        yield Strategy((Shard.of(dim, layout), REPLICATE), (Shard.of(n - 2, layout),))
    elif side == 1 and dim == right.ndim - 1:
        yield Strategy((REPLICATE, Shard.of(dim, layout)), (Shard.of(n - 1, layout),), kind="column")
    else:
        out = dim + n - (left, right)[side].ndim
        yield Strategy((_batch(left, out, n, layout), _batch(right, out, n, layout)), (Shard.of(out, layout),))


def _batch(tensor: Tensor, out_dim: int, n: int, layout: Layout) -> Placement:
    """An operand's placement when the result is sharded on a batch dimension."""
    dim = out_dim - (n - tensor.ndim)
    if dim < 0 or is_one(tensor.shape[dim]):
        return REPLICATE
    return Shard.of(dim, layout)


@builtin_rule(aten.baddbmm.default, samples="matmul")
def baddbmm(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """``beta * c + alpha * a @ b``: the batch."""
    addend, left, right = call.inputs
    for tensor, placement in zip(call.inputs, placements, strict=True):
        if not isinstance(placement, Shard) or len(placement.layouts) != 1:
            continue
        dim, layout = placement.layouts[0]
        if dim == tensor.ndim - 3:
            batch = [_batch(t, 0, 3, layout) for t in (addend, left, right)]
            yield Strategy(tuple(batch), (Shard.of(0, layout),))


@builtin_rule(aten.linalg_solve_triangular.default, samples="matmul")
def solve_triangular(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """The batch, or the right-hand sides of a system, which are independent of each other."""
    n, left = call.out.ndim, call.kwargs.get("left", True)
    side = n - 1 if left else n - 2
    for tensor, placement in zip(call.inputs, placements, strict=True):
        if not isinstance(placement, Shard) or len(placement.layouts) != 1:
            continue
        dim, layout = placement.layouts[0]
        out = dim + n - tensor.ndim
        if out < n - 2 and same_size(tensor.shape[dim], call.out.shape[out]):
            batch = [_batch(t, out, n, layout) for t in call.inputs]
            yield Strategy(tuple(batch), (Shard.of(out, layout),))
        elif tensor is call.inputs[1] and out == side:
            yield Strategy((REPLICATE, placement), (Shard.of(out, layout),))


@builtin_rule(
    aten.linalg_inv_ex.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_matrix_exp.default,
    samples="matmul",
)
def square_matrices(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Inverse, Cholesky factor and exponential of each matrix of a batch: the batch."""
    (placement,) = placements
    if isinstance(placement, Shard) and all(d < call.inputs[0].ndim - 2 for d in placement.dims):
        yield Strategy((placement,), (placement,) * len(call.outputs))


@builtin_rule(aten._cdist_forward.default, samples="matmul")
def distances(call: Call, placements: Sequence[InputPlacement]) -> Iterable[Strategy]:
    """Distances between all points of the left and of the right: the points of either, not the coordinates."""
    n = call.out.ndim
    for k, tensor in enumerate(call.inputs):
        for layout in layouts_on(call, placements, k, tensor.ndim - 2):
            mine = Shard.of(tensor.ndim - 2, layout)
            yield Strategy((mine, REPLICATE) if k == 0 else (REPLICATE, mine), (Shard.of(n - 2 + k, layout),))
        for d in range(tensor.ndim - 2):
            out = d + n - tensor.ndim
            for layout in layouts_on(call, placements, k, d):
                if same_size(tensor.shape[d], call.out.shape[out]):
                    batch = [_batch(t, out, n, layout) for t in call.inputs]
                    yield Strategy(tuple(batch), (Shard.of(out, layout),))
