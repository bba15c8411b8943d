"""Linear layers with quantized weights, tile by tile, against the dequantized weight."""

from __future__ import annotations

import pytest
import torch
from kernels.quantized.cases import CASES

from paraxis.kernels.quantized import linear, quantized_grouped_mm, quantized_linear, quantized_mm

MATRICES = [name for name, (_, _, weight) in CASES.items() if weight.dim() == 2]


@pytest.mark.parametrize("tile", [1, 1 << 11, 1 << 20])
@pytest.mark.parametrize("name", MATRICES)
def test_linear_and_its_backward_matmul(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "TILE_BYTES", tile)
    parts, encoding, weight = CASES[name]
    outputs, inputs = weight.shape
    x, g, bias = torch.randn(2, 3, inputs), torch.randn(2, 3, outputs), torch.randn(outputs)
    expected = x.double() @ weight.t() + bias.double()
    assert torch.allclose(quantized_linear(x, parts, encoding, bias).double(), expected, atol=1e-4)
    assert torch.allclose(quantized_mm(g, parts, encoding, inputs).double(), g.double() @ weight, atol=1e-4)


@pytest.mark.parametrize("name", ["stack", "stack of groups"])
@pytest.mark.parametrize("transposed", [True, False])
def test_experts_one_by_one(name: str, transposed: bool) -> None:
    parts, encoding, weight = CASES[name]
    outputs, inputs = weight.shape[-2:]
    x, ends = torch.randn(7, inputs if transposed else outputs), torch.tensor([2, 2, 6], dtype=torch.int32)
    found = quantized_grouped_mm(x, parts, encoding, ends, inputs, transposed)
    for rows, expert in ((slice(0, 2), 0), (slice(2, 6), 2)):
        each = weight[expert].t() if transposed else weight[expert]
        assert torch.allclose(found[rows].double(), x[rows].double() @ each, atol=1e-4)
    assert not found[6:].any()  # of no expert


def test_only_a_tile_is_dequantized_at_a_time() -> None:
    """A layer of 4 MiB in float32 allocates less than two tiles beside its result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    from kernels.quantized.cases import case

    from paraxis.kernels.quantized import Encoding

    parts, encoding, _ = case(1024, 1024, Encoding((128, 128)))
    with Sizes():
        quantized_linear(torch.randn(1, 1024), parts, encoding)
    assert largest <= linear.TILE_BYTES


def test_operators_have_fake_implementations() -> None:
    parts, encoding, weight = CASES["groups"]
    inputs, key = weight.shape[1], encoding.key
    x = torch.randn(3, inputs)
    ops = torch.ops.paraxis
    torch.library.opcheck(ops.quantized_linear.default, (x, *parts, key, None), test_utils="test_faketensor")
    torch.library.opcheck(ops.quantized_mm.default, (x[:, :24], *parts, key, inputs), test_utils="test_faketensor")
    torch.library.opcheck(ops.dequantize.default, (*parts, key, inputs, torch.float32), test_utils="test_faketensor")
    parts, encoding, weight = CASES["stack"]
    ends = torch.tensor([1, 2, 3], dtype=torch.int32)
    arguments = (torch.randn(3, 32), *parts, encoding.key, ends, 32, True)
    torch.library.opcheck(ops.quantized_grouped_mm.default, arguments, test_utils="test_faketensor")
