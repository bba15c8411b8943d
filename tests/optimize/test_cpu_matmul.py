"""Matmuls on a CPU: linear layers and grouped matmuls run in the kernels, in eager programs and inside Inductor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 -- defines the operator
from helpers.graphs import assert_same_results, targets, trace

from paraxis.kernels.cpu import gemv
from paraxis.optimize.cpu_matmul import CpuMatmulPass, use_cpu_matmul

aten = torch.ops.aten


def experts(x: torch.Tensor, weight: torch.Tensor, stacked: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A linear layer, and a grouped matmul."""
    return torch.ops.transformers.grouped_mm_fallback(F.linear(x, weight), stacked, offsets)


def draw() -> list[torch.Tensor]:
    """Rows, a weight, two stacked weights, and the last row of each."""
    torch.manual_seed(0)
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    return [torch.randn(4, 16), torch.randn(16, 16), torch.randn(2, 16, 8), offsets]


def test_eager_programs_call_the_kernels() -> None:
    inputs = draw()
    module = trace(experts, inputs)
    assert use_cpu_matmul(module) == 2
    assert gemv.linear in targets(module) and gemv.grouped_mm in targets(module)
    with torch.no_grad():
        assert_same_results(module, experts, inputs, rtol=1e-5, atol=1e-5)


def test_compiled_programs_have_an_operator_for_grouped_matmuls_only() -> None:
    """Linear layers are replaced by the pass inside Inductor, after its decompositions."""
    inputs = draw()
    module = trace(experts, inputs)
    assert use_cpu_matmul(module, compiled=True) == 1
    assert torch.ops.paraxis.cpu_grouped_mm.default in targets(module) and aten.linear.default in targets(module)
    with torch.no_grad():
        assert_same_results(module, experts, inputs, rtol=1e-5, atol=1e-5)


def mm_and_addmm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matmul with a transposed weight, with and without a bias, as Inductor's graph has them."""
    transposed = torch.permute(weight, [1, 0])
    return torch.mm(x, transposed), torch.addmm(bias, x, transposed)


def test_inductors_pass_replaces_matmuls_that_a_kernel_computes() -> None:
    inputs = [torch.randn(1, 512), torch.randn(256, 512), torch.randn(256)]
    module = trace(mm_and_addmm, inputs, pre_dispatch=False)
    CpuMatmulPass()(module.graph)
    module.graph.lint()
    module.recompile()
    expected = 2 if gemv.fits(inputs[0], inputs[1].t()) else 0
    assert targets(module).count(torch.ops.paraxis.cpu_gemv.default) == expected
    with torch.no_grad():
        assert_same_results(module, mm_and_addmm, inputs, rtol=1e-4, atol=1e-4)


def test_pass_has_a_key_for_inductors_cache() -> None:
    assert CpuMatmulPass().uuid() == CpuMatmulPass().uuid() and CpuMatmulPass().uuid()
