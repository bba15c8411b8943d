"""The operators on quantized weights on a GPU give what they give on a CPU."""

from __future__ import annotations

import pytest
import torch
from kernels.quantized.cases import CASES
from kernels.triton.quantized_weights import weight

from paraxis.tensor.quantized import QuantizedTensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("rows", [1, 3, 600])
@pytest.mark.parametrize("name", ["blocks", "groups that do not divide", "zero points", "index of both"])
def test_layers_are_those_of_a_cpu(name: str, rows: int) -> None:
    parts, encoding, plain = CASES[name]
    x = torch.randn(rows, plain.shape[1])
    on_gpu = QuantizedTensor(parts.map(torch.Tensor.cuda), encoding, plain.shape, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = False
    found = torch.nn.functional.linear(x.cuda(), on_gpu, torch.ones(plain.shape[0]).cuda())
    torch.testing.assert_close(found.cpu(), x @ plain.float().T + 1, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((found @ on_gpu).cpu(), found.cpu() @ plain.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_those_of_a_cpu(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts, encoding = weight("exponents", 48, 256)
    stack = parts.map(lambda t: torch.stack([t, t.flip(0), t]))
    x, ends = torch.randn(rows, 256).to(dtype), torch.tensor([1, rows - 1, rows], dtype=torch.int32)
    arguments = (encoding.key, ends, 256, True)
    expected = torch.ops.paraxis.quantized_grouped_mm(x.float(), *stack, *arguments)
    moved = (encoding.key, ends.cuda(), 256, True)
    QuantizedTensor(stack.map(torch.Tensor.cuda), encoding, (3, 48, 256), dtype)  # registers the kernels
    found = torch.ops.paraxis.quantized_grouped_mm(x.cuda(), *stack.map(torch.Tensor.cuda), *moved).float().cpu()
    assert (found - expected).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()
