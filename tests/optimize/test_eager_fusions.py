"""Programs with fewer operators give the same numbers, and what only looks similar stays."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from paraxis.optimize.eager_fusions import fuse_eager_operators

ROOT = math.sqrt(2 / math.pi)


def spelled_out(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))


def fast(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def after_a_sum(x: torch.Tensor) -> torch.Tensor:
    y = x + 2 * x.flip(0)
    return (torch.tanh((y + y.pow(2) * y * 0.044715) * ROOT) + 1) * (y * 0.5)


def with_another_constant(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.0447 * torch.pow(x, 3.0))))


def of_two(x: torch.Tensor) -> torch.Tensor:
    y = x.flip(0)
    return 0.5 * y * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))


def without_the_one(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (2.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))


def squared(x: torch.Tensor) -> torch.Tensor:
    inside = 1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))
    return inside * inside


@pytest.mark.parametrize(
    ("function", "found"),
    [(spelled_out, 1), (fast, 1), (after_a_sum, 1)]
    + [(f, 0) for f in (with_another_constant, of_two, without_the_one, squared)],
)
def test_gelu(function: Callable[[torch.Tensor], torch.Tensor], found: int) -> None:
    x = torch.linspace(-6, 6, 101)
    module = make_fx(function, tracing_mode="fake")(x)
    before = len(module.graph.nodes)
    assert fuse_eager_operators(module) == found
    assert (len(module.graph.nodes) < before) == bool(found)
    torch.testing.assert_close(module(x), function(x), rtol=1e-6, atol=1e-6)
    low = x.bfloat16()  # rounds after every operator: not the same numbers, so left as it is
    assert fuse_eager_operators(make_fx(function, tracing_mode="fake")(low)) == 0


class Rows(nn.Module):
    """A layer between reshapes, and one whose result gets another shape."""

    def __init__(self, last: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 6), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(-1, x.shape[-1])).reshape(self.last) * 2


@pytest.mark.parametrize(("last", "found"), [((2, 3, 6), 1), ((3, 2, 6), 0), ((2, 3, 3, 2), 0)])
def test_layers_between_reshapes(last: tuple[int, ...], found: int) -> None:
    module, x = Rows(last), torch.randn(2, 3, 4)
    program = _program(module, x)
    assert fuse_eager_operators(program) == found
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.reshape.default)) == 2 - 2 * found
    torch.testing.assert_close(program(x), module(x), rtol=0, atol=0)


def _program(module: Rows, x: torch.Tensor) -> GraphModule:
    """As the local programs are: operators, and layers that are called."""
    graph = torch.fx.Graph()
    reshape = torch.ops.aten.reshape.default
    given = graph.placeholder("x")
    rows = graph.call_function(reshape, (given, [-1, 4]))
    made = graph.call_module("layer", (rows,))
    result = graph.call_function(reshape, (made, list(module.last)))
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (result, 2)))
    for node, shape in ((given, x.shape), (rows, (6, 4)), (made, (6, 6)), (result, module.last)):
        node.meta["val"] = torch.empty(shape, device="meta")
    return GraphModule(module, graph)
