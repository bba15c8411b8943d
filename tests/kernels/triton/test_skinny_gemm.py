"""Linear layers of a batched decode step on a GPU against torch's, with biases, the gate and split-K."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(512, 64, 64), (300, 300), (1000,)])
@pytest.mark.parametrize(("batch", "inputs"), [(2, 64), (7, 1040), (33, 4096), (64, 512)])
def test_result_is_that_of_the_operators(
    batch: int, inputs: int, rows: tuple[int, ...], bias: bool, splits: int | None
) -> None:
    from paraxis.kernels.triton.skinny_gemm import Tiles, launch

    torch.manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    x, weights = draw(batch, 1, inputs), [draw(n, inputs) / inputs**0.5 for n in rows]
    biases = [draw(n) for n in rows] if bias else []
    sizes = None if splits is None else Tiles(32, 64, splits, 3, 4)
    exact = [
        F.linear(x.double(), w.double(), biases[i].double() if bias else None).bfloat16() for i, w in enumerate(weights)
    ]
    found = launch(x, weights, biases, False, sizes)
    torch.testing.assert_close(found, torch.cat(exact, -1), rtol=1.6e-2, atol=1e-2)
    if len(rows) == 2:
        found = launch(x, weights, biases, True, sizes)
        torch.testing.assert_close(found, F.silu(exact[0]) * exact[1], rtol=2e-2, atol=2e-2)
