"""Linear layers on the rows of a batched decode step become one kernel, with the SiLU gate after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import trace
from optimize.decode_kernels.reference import needs_kernels, register, rewrite_on_cpu

from paraxis.optimize.decode_kernels import use_decode_kernels

pytestmark = needs_kernels
WIDTH = 64


def draw(batch: int, *rows: int, dtype: torch.dtype = torch.bfloat16, width: int = WIDTH) -> list[torch.Tensor]:
    """Rows, and weights with so many rows."""
    torch.manual_seed(0)
    return [torch.randn(*shape).to(dtype) for shape in ((batch, 1, width), *((n, width) for n in rows))]


def projections(x: Any, *weights: Any) -> list[torch.Tensor]:
    return [F.linear(x, w) for w in weights]


def feed_forward(x: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("batch", [2, 7, 64])
def test_projections_of_the_same_rows_become_one_kernel(batch: int) -> None:
    _, kernels = rewrite_on_cpu(projections, draw(batch, 32, 16, 16))
    assert kernels == ["skinny_gemm"]


def test_gate_is_fused() -> None:
    module, kernels = rewrite_on_cpu(feed_forward, [*draw(4, 80, 80), torch.randn(WIDTH, 80).bfloat16()])
    assert kernels == ["skinny_gemm", "skinny_gemm"]
    gated = [node.args[3] for node in module.graph.nodes if "skinny_gemm" in node.name]
    assert gated == [True, False]


@pytest.mark.parametrize(
    "inputs",
    [
        draw(65, 32, 16),
        draw(4, 32, 16, dtype=torch.float32),
        draw(4, 32, 16, width=72),
        draw(4, 32, 16, width=48),
    ],
    ids=["more rows", "float32", "columns that are no multiple of 16", "few columns"],
)
def test_other_layers_stay(inputs: list[torch.Tensor]) -> None:
    register()
    module = trace(projections, inputs)
    assert use_decode_kernels(module, inputs) == 0


def test_weight_that_is_computed_stays() -> None:
    def computed(x: Any, a: Any, b: Any) -> list[torch.Tensor]:
        return [F.linear(x, a * 2), F.linear(x, b)]

    register()
    inputs = draw(4, 32, 16)
    module = trace(computed, inputs)
    assert use_decode_kernels(module, inputs) == 1
    assert sum(node.target is torch.ops.aten.linear.default for node in module.graph.nodes) == 1
