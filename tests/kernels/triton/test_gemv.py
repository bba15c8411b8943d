"""GEMV on a GPU, with and without fused RMSNorm and SiLU gate, against the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def with_operators(x: Any, residual: Any, norm: Any, weights: Any, biases: Any, gated: bool) -> tuple[Any, Any]:
    total = x if residual is None else x + residual
    row = total
    if norm is not None:
        wide = total if total.dtype == torch.float64 else total.float()
        row = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    results = [F.linear(row, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    return F.silu(results[0]) * results[1] if gated else torch.cat(results, -1), total


CASES = [
    # features, rows of the weights, gated, residual, norm, bias
    (256, (40, 24, 8), False, True, True, False),
    (1792, (4096,), False, False, False, False),
    (96, (33, 7), False, False, True, True),
    (4096, (1792, 1792), True, True, True, False),
    (512, (48, 48), True, False, False, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features, rows, gated, residual, norm, bias", CASES)
def test_result_is_that_of_the_operators(
    features: int, rows: Any, gated: bool, residual: bool, norm: bool, bias: bool, dtype: torch.dtype
) -> None:
    from paraxis.kernels.triton.gemv import gemv, rmsnorm_gemv

    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    x, other = draw(1, 1, features), draw(1, 1, features) if residual else None
    by = draw(features) if norm else None
    weights, biases = [draw(n, features) * 0.05 for n in rows], [draw(n) for n in rows] if bias else []
    if norm:
        found, total = rmsnorm_gemv(x, other, by, 1e-5, weights, biases, gated)
        assert total.numel() == 0 if other is None else torch.equal(total, x + other)
    else:
        found = gemv(x, weights, biases, gated)
    wide = [None if t is None else t.double() for t in (x, other, by)]
    exact, _ = with_operators(*wide, [w.double() for w in weights], [b.double() for b in biases], gated)
    plain, _ = with_operators(x, other, by, weights, biases, gated)
    assert found.shape == plain.shape and found.dtype == dtype
    assert error(found, exact) <= 1.5 * error(plain, exact) + 1e-6


def test_block_sizes_of_all_shapes() -> None:
    from paraxis.kernels.triton.gemv import blocks

    for rows in (1, 100, 768, 4096, 128256):
        for features in (16, 512, 1792, 4096, 14336):
            for size in (2, 4):
                n, k, warps = blocks(rows, features, rows == 768, size)
                assert n > 0 and k & (k - 1) == 0 and warps in (4, 8) and n * k <= 16384
