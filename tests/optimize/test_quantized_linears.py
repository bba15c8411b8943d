"""Linear layers with a quantized weight become one operator on its parts; what is something else stays."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.graphs import targets, trace
from kernels.quantized.cases import CASES

from paraxis.optimize.quantized_linears import quantized_weight_of, use_quantized_linears
from paraxis.tensor.quantized import QuantizedTensor, part_of

linear = torch.ops.paraxis.quantized_linear.default


def weight(name: str = "groups", transposed: bool = False) -> QuantizedTensor:
    parts, encoding, plain = CASES[name]
    shape = plain.shape[::-1] if transposed else plain.shape
    return QuantizedTensor(parts, encoding, shape, torch.float32, transposed)


def rewrite(function: Any, *inputs: Any) -> tuple[torch.fx.GraphModule, int]:
    plain = [x.dequantized() if isinstance(x, QuantizedTensor) else x for x in inputs]
    module = trace(function, plain)
    count = use_quantized_linears(module, inputs)
    torch.testing.assert_close(module(*inputs), function(*plain), rtol=1e-4, atol=1e-4)
    return module, count


def test_layers_with_and_without_bias() -> None:
    x, w, bias = torch.randn(3, 64), weight(), torch.randn(24)
    module, count = rewrite(lambda x, w, b: F.linear(x, w, b) + F.linear(x * 2, w), x, w, bias)
    assert count == 2 and targets(module).count(linear) == 2
    assert targets(module).count(part_of) == 2, "the uses of a weight share its parts"
    placeholders = module.graph.find_nodes(op="placeholder")
    node = module.graph.find_nodes(op="call_function", target=linear)[0]
    assert quantized_weight_of(node, dict(zip(placeholders, (x, w, bias), strict=True))) is w


def test_plain_and_transposed_weights_stay() -> None:
    x = torch.randn(3, 64)
    assert rewrite(F.linear, x, torch.randn(24, 64))[1] == 0
    assert rewrite(lambda x, w: x @ w, x, weight(transposed=True))[1] == 0
