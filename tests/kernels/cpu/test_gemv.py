"""GEMV on a CPU: linear layers of one to four rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 -- defines an operator
from kernels.cpu.matmuls import FORMS, record_weights
from torch.fx import symbolic_trace
from torch.utils.flop_counter import FlopCounterMode

from paraxis.kernels.cpu import gemv
from paraxis.kernels.cpu.build import load_kernel
from paraxis.optimize.cpu_matmul import CpuMatmulPass, use_cpu_matmul

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(load_kernel("gemv") is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that the kernel was called with."""
    monkeypatch.setattr(gemv, "is_faster", lambda count, column_major: True)
    return record_weights(monkeypatch, gemv, "_gemv")


def error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    """The error of a matmul in units of the rounding error of its terms."""
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == expected.shape and found.is_contiguous() and found.dtype == torch.float32
    terms = x.double().abs() @ weight.double().abs().t() + 1
    return float(((found - expected).abs() / (terms * 2**-23)).max())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (257, 129), (5, 2000), (8200, 1), (1, 8192), (1000, 33)])
def test_result_is_that_of_linear(outputs: int, inputs: int, form: str, threads: int, calls: list[Any]) -> None:
    torch.manual_seed(0)
    weight = FORMS[form](torch.randn(outputs, inputs))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in range(1, gemv.MAX_ROWS + 1):
            for bias in (None, torch.randn(outputs)):
                x = torch.randn(1, count, inputs)
                assert error(gemv.linear(x, weight, bias), x, weight, bias) < 8
        x = torch.randn(inputs, 2).t()  # not contiguous
        assert error(gemv.linear(x, weight), x, weight, None) < 8
        assert error(gemv.linear(x[0], weight), x[0], weight, None) < 8
    finally:
        torch.set_num_threads(before)
    assert len(calls) == 2 * gemv.MAX_ROWS + 2


def test_torch_computes_what_the_kernel_does_not_support(calls: list[Any]) -> None:
    """Many rows, other dtypes, a weight with gaps, and everything that differentiates, traces, counts or batches."""
    x, weight = torch.randn(2, 64), torch.randn(160, 64)
    others: list[tuple[torch.Tensor, torch.Tensor]] = [
        (torch.randn(gemv.MAX_ROWS + 1, 64), weight),
        (x.double(), weight.double()),
        (x.bfloat16(), weight.bfloat16()),
        (x, torch.randn(160, 128)[:, ::2]),
        (x, torch.randn(8, 64)),
        (torch.randn(0, 64), weight),
    ]
    for rows, other in others:
        assert torch.equal(gemv.linear(rows, other), F.linear(rows, other))
    with torch.enable_grad():
        weight.requires_grad_()
        assert gemv.linear(x, weight).requires_grad
    weight = weight.detach()
    with torch.autocast("cpu", torch.bfloat16):
        assert gemv.linear(x, weight).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        gemv.linear(x, weight)
    assert counter.get_total_flops() == 2 * 2 * 64 * 160
    batched = torch.vmap(lambda row: gemv.linear(row, weight))(x)
    torch.testing.assert_close(batched, F.linear(x, weight))
    _, tangent = torch.func.jvp(lambda row: gemv.linear(row, weight), (x,), (x,))
    torch.testing.assert_close(tangent, F.linear(x, weight))
    with pytest.raises(RuntimeError):
        gemv.linear(torch.randn(2, 63), weight)
    traced = torch.jit.trace(lambda row: gemv.linear(row, weight), (x,), check_trace=False)
    torch.testing.assert_close(traced(2 * x), F.linear(2 * x, weight))
    for first, second in ((torch._neg_view(x), weight), (x, torch._neg_view(weight)), (x, weight.to_sparse_csr())):
        torch.testing.assert_close(gemv.linear(first, second), F.linear(first, second))
    out = torch.empty(2, 160)
    with FlopCounterMode(display=False) as counter:
        gemv.mm_into(x, weight.t(), out)
    assert counter.get_total_flops() == 2 * 2 * 64 * 160
    assert not calls
    gemv.linear(x, weight)
    assert calls == [(160, 64)]


def test_dynamo_traces_one_graph_for_any_number_of_rows() -> None:
    """Also for a number of rows that depends on data."""
    weight, graphs = torch.randn(160, 64), []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module

    layer = torch.compile(lambda x: gemv.linear(x, weight), dynamic=True, fullgraph=True, backend=backend)
    for count in (2, 3, 9, 20):
        x = torch.randn(count, 64)
        torch.testing.assert_close(layer(x), F.linear(x, weight))
    assert len(graphs) == 1
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        chosen = torch.compile(lambda x, mask: gemv.linear(x[mask], weight), fullgraph=True, backend="eager")
        torch.testing.assert_close(chosen(x, x[:, 0] > 0), F.linear(x[x[:, 0] > 0], weight))


def test_the_vendor_of_the_processor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a fake weight as for a real one."""
    x, weight = torch.randn(2, 64), torch.randn(160, 64)
    for vendor, expected in (
        ("AuthenticAMD", [True] * 4),
        ("GenuineIntel", [False, True, False, False]),
        ("", 4 * [False]),
    ):
        monkeypatch.setattr(gemv, "cpu_vendor", lambda vendor=vendor: vendor)
        cases = [(count, w) for w in (weight, weight.t().contiguous().t()) for count in (2, 3)]
        assert [gemv.fits(torch.empty(count, 64), w.t()) for count, w in cases] == expected
        found = [gemv._gemv(torch.randn(count, 64), w, None) is not None for count, w in cases]
        assert found == expected
    torch.testing.assert_close(torch.ops.paraxis.cpu_gemv(x, weight, None), F.linear(x, weight))


@pytest.mark.parametrize("compiled", [False, True])
def test_pass_replaces_linear_layers_and_experts(compiled: bool, calls: list[Any]) -> None:
    weight, experts, ends = torch.randn(128, 64), torch.randn(2, 64, 128), torch.tensor([1, 3])

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return aten.linear(x, weight), torch.ops.transformers.grouped_mm_fallback(x, experts, ends)

    x = torch.randn(3, 64)
    module = symbolic_trace(model)
    for node in module.graph.nodes:  # as a captured program has them
        if node.op == "call_function" and hasattr(node.target, "default"):
            node.target = node.target.default
    expected = module(x)
    assert use_cpu_matmul(module, compiled) == (1 if compiled else 2)
    for found, before in zip(module(x), expected, strict=True):
        torch.testing.assert_close(found, before)
    assert len(calls) == (2 if compiled else 3)


def test_grouped_mm_of_experts(calls: list[Any]) -> None:
    """An expert without rows, one with many, and rows of no expert at the end."""
    rows, ends = torch.randn(13, 64), torch.tensor([1, 1, 4, 12])
    for weights in (torch.randn(4, 64, 160), torch.randn(4, 160, 64).transpose(1, 2)):
        found = torch.ops.paraxis.cpu_grouped_mm(rows, weights, ends)
        owners = [0, 2, 2, 2, *[3] * 8]
        expected = torch.stack([row @ weights[e] for row, e in zip(rows, owners, strict=False)])
        torch.testing.assert_close(found[:12], expected)
        assert not found[12:].any()
    assert calls == [(160, 64)] * 4


@pytest.mark.parametrize("transposed", [False, True])
def test_inductor_calls_the_kernel(transposed: bool, calls: list[Any]) -> None:
    """With and without a bias, for row-major and column-major weights."""
    first, second = torch.randn(192, 64), torch.randn(64, 192)
    if transposed:
        first, second = first.t().contiguous().t(), second.t().contiguous().t()
    bias = torch.randn(192)

    def model(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, first, bias)), second) + x

    compiled = torch.compile(model, dynamic=False, options={"post_grad_custom_pre_pass": CpuMatmulPass()})
    for count, ours in ((1, 2), (3, 4), (7, 4)):
        x = torch.randn(1, count, 64)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
        assert len(calls) == ours
    assert CpuMatmulPass().uuid()  # the key of Inductor's cache
