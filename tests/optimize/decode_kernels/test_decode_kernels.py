"""A decode step of one layer: all of it in kernels, with the same results and the same writes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.graphs import call_of, targets, trace
from optimize.decode_kernels.reference import register, rewrite_on_cpu, rope

from paraxis.distributed.operators import all_reduce
from paraxis.optimize.decode_kernels import use_decode_kernels

aten = torch.ops.aten
WIDTH, HEADS, GROUPS, SIZE, LENGTH, INNER = 64, 2, 2, 16, 12, 96


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def repeat(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, None].expand(1, HEADS, GROUPS, LENGTH, SIZE).reshape(1, HEADS * GROUPS, LENGTH, SIZE)


def step(
    x: Any,
    residual: Any,
    norms: Any,
    projections: Any,
    mlp: Any,
    caches: Any,
    counter: Any,
    cos: Any,
    sin: Any,
    mask: Any,
) -> tuple[torch.Tensor, ...]:
    """Attention and feed-forward of a layer, as models write them."""
    x = x + residual
    row = norm(x, norms[0])
    q, k, v = (F.linear(row, w).view(1, 1, -1, SIZE).transpose(1, 2) for w in projections[:3])
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    at = torch.arange(1) + counter
    keys, values = (
        aten.index_put_(cache, [None, None, at], rows)
        for cache, rows in zip(caches, (rope(k, cos, sin), v), strict=True)
    )
    counter.add_(1)
    attended = F.scaled_dot_product_attention(rope(q, cos, sin), repeat(keys), repeat(values), mask)
    x = x + F.linear(attended.transpose(1, 2).reshape(1, 1, -1), projections[3])
    row = norm(x, norms[1])
    return x, F.linear(F.silu(F.linear(row, mlp[0])) * F.linear(row, mlp[1]), mlp[2])


def draw() -> list[torch.Tensor]:
    """All inputs of the step, one after the other."""
    torch.manual_seed(0)
    heads = HEADS * GROUPS * SIZE
    weights = [(heads, WIDTH), (HEADS * SIZE, WIDTH), (HEADS * SIZE, WIDTH), (WIDTH, heads)]
    weights += [(INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)]
    rows = [torch.randn(1, 1, WIDTH), torch.randn(1, 1, WIDTH), torch.rand(WIDTH), torch.rand(WIDTH)]
    caches = [torch.randn(1, HEADS, LENGTH, SIZE) for _ in range(2)]
    angles = [torch.rand(1, 1, SIZE) for _ in range(2)]
    mask = torch.arange(LENGTH)[None, None, None, :] <= 4
    return [*rows, *(torch.randn(shape) / 8 for shape in weights), *caches, torch.tensor([4]), *angles, mask]


def model(*inputs: Any) -> tuple[torch.Tensor, ...]:
    return step(inputs[0], inputs[1], inputs[2:4], inputs[4:8], inputs[8:11], inputs[11:13], *inputs[13:])


def test_decode_step_is_five_kernels() -> None:
    module, kernels = rewrite_on_cpu(model, draw())
    expected = ["rmsnorm_gemv", "rope_decode_attention", "gemv", "rmsnorm_gemv", "gemv"]
    assert kernels == expected, "query, key and value; attention; output; gate and up; down"
    left = {aten.linear.default, aten.rsqrt.default, aten.silu.default, aten.index_put_.default, aten.add.Tensor}
    assert not left & set(targets(module))
    assert targets(module)[-1] is aten._foreach_add_.Scalar, "the counter is incremented at the end"


def test_all_reduced_row_has_the_shape_of_its_terms() -> None:
    """The partitioner notes no local shape on an all-reduce. It is part of a residual sum."""
    register()
    inputs = draw()

    def block(x: Any, residual: Any, weight: Any, projection: Any) -> torch.Tensor:
        return F.linear(norm(x + residual * 1, weight), projection)

    module = trace(block, [*inputs[:3], inputs[4]])
    scaled = call_of(module, aten.mul.Tensor)
    scaled.target, scaled.args = all_reduce, (scaled.args[0], "sum", "0")
    del scaled.meta["val"]
    assert use_decode_kernels(module, [*inputs[:3], inputs[4]]) == 1
    assert call_of(module, torch.ops.paraxis.rmsnorm_gemv.default).args[1] is scaled
