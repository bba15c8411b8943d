"""GEMM on a CPU with oneDNN: linear layers of many rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels.cpu.matmuls import FORMS, record_weights

from paraxis.kernels.cpu import gemm_onednn, gemv
from paraxis.optimize.cpu_matmul import CpuMatmulPass

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that oneDNN was called with, on whatever processor."""
    monkeypatch.setattr(gemm_onednn, "cpu_vendor", lambda: "AuthenticAMD")
    return record_weights(monkeypatch, gemm_onednn, "onednn_linear")


def assert_accurate(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected.float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 512), (257, 1023), (1, 1 << 17), (1 << 17, 1)])
def test_result_is_that_of_linear(outputs: int, inputs: int, form: str, calls: list[Any]) -> None:
    torch.manual_seed(0)
    weight = FORMS[form](torch.randn(outputs, inputs) / inputs**0.5)
    for rows in ((64,), (2, 51)):
        for bias in (None, torch.randn(outputs)):
            x = torch.randn(*rows, inputs)
            assert_accurate(gemv.linear(x, weight, bias), x, weight, bias)
    assert len(calls) == 4


def test_torch_computes_what_onednn_should_not(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matmuls, other dtypes and layouts, other processors, and everything that differentiates or casts."""
    x, weight = torch.randn(64, 512), torch.randn(256, 512)
    others: list[tuple[torch.Tensor, torch.Tensor]] = [
        (x[:5], weight),
        (x.double(), weight.double()),
        (x.bfloat16(), weight.bfloat16()),
        (torch.randn(512, 64).t(), weight),
        (x, torch.randn(256, 1024)[:, ::2]),
        (x, torch._neg_view(weight)),
        (x, torch.randn(256 + 511).unfold(0, 512, 1)),
        (x, torch.randn(3 * 256 + 512).as_strided((256, 512), (3, 1))),
    ]
    for rows, other in others:
        assert torch.equal(gemv.linear(rows, other), F.linear(rows, other))
    with torch.enable_grad():
        assert gemv.linear(x, weight.clone().requires_grad_()).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert gemv.linear(x, weight).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        gemv.linear(x, weight)
    with pytest.raises(RuntimeError):
        gemv.linear(torch.randn(64, 511), weight)
    for vendor in ("GenuineIntel", ""):
        monkeypatch.setattr(gemm_onednn, "cpu_vendor", lambda vendor=vendor: vendor)
        gemv.linear(x, weight)
    assert not calls


def test_grouped_mm_of_experts(calls: list[Any]) -> None:
    rows, weights = torch.randn(65, 512), torch.randn(2, 512, 256) / 22
    found = gemv.grouped_mm(rows, weights, torch.tensor([1, 65]))
    torch.testing.assert_close(found, torch.cat([rows[:1] @ weights[0], rows[1:] @ weights[1]]))
    assert calls == [(256, 512)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_inductor_calls_onednn(transposed: bool, dynamic: bool, calls: list[Any]) -> None:
    """With and without a bias, for a static and a dynamic number of rows."""
    first, second = torch.randn(512, 256) / 16, torch.randn(256, 512) / 22
    if transposed:
        first, second = first.t().contiguous().t(), second.t().contiguous().t()
    first, second, bias = (torch.nn.Parameter(x) for x in (first, second, torch.randn(512)))  # static shapes

    def model(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, first, bias)), second) + x

    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=dynamic, options={"post_grad_custom_pre_pass": CpuMatmulPass()})
    for count, ours in ((64, 2), (100, 4), (40, 4)):
        x = torch.randn(1, count, 256)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
        assert len(calls) == ours
