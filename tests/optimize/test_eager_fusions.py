"""Sequences that one operator computes become that operator; sequences that only look similar stay."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers.graphs import assert_same_results, trace
from torch import nn
from torch.fx import GraphModule

from paraxis.distributed.operators import all_reduce
from paraxis.graph.local_program import FULL
from paraxis.optimize.eager_fusions import fuse_eager_operators
from paraxis.plan.offline import simulated_group

ROOT = math.sqrt(2 / math.pi)


def gelu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_factored(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def gelu_of_a_sum(x: torch.Tensor) -> torch.Tensor:
    y = x + 2 * x.flip(0)
    return (torch.tanh((y + y.pow(2) * y * 0.044715) * ROOT) + 1) * (y * 0.5)


def gelu_with_another_constant(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.0447 * torch.pow(x, 3.0))))


def gelu_of_two_inputs(x: torch.Tensor) -> torch.Tensor:
    y = x.flip(0)
    return 0.5 * y * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_plus_two(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (2.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))


def squared_factor(x: torch.Tensor) -> torch.Tensor:
    inside = 1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))
    return inside * inside


@pytest.mark.parametrize(
    ("function", "count"),
    [(f, 1) for f in (gelu_by_tanh, gelu_factored, gelu_of_a_sum)]
    + [(f, 0) for f in (gelu_with_another_constant, gelu_of_two_inputs, gelu_plus_two, squared_factor)],
)
def test_gelu_by_tanh_becomes_one_operator(function: Callable[[torch.Tensor], torch.Tensor], count: int) -> None:
    x = torch.linspace(-6, 6, 101)
    module = trace(function, [x], tracing_mode="fake", pre_dispatch=False)
    before = len(module.graph.nodes)
    assert fuse_eager_operators(module) == count
    assert (len(module.graph.nodes) < before) == bool(count)
    assert_same_results(module, function, [x], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [gelu_by_tanh, gelu_factored, gelu_of_a_sum])
def test_gelu_in_bfloat16_stays(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """It rounds after every operator, so one operator would give other numbers."""
    module = trace(function, [torch.linspace(-6, 6, 101).bfloat16()], tracing_mode="fake", pre_dispatch=False)
    assert fuse_eager_operators(module) == 0


class Rows(nn.Module):
    """A layer between reshapes, of which the last may give another shape than the input's."""

    def __init__(self, last: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 6), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(-1, x.shape[-1])).reshape(self.last) * 2


@pytest.mark.parametrize(("last", "count"), [((2, 3, 6), 1), ((3, 2, 6), 0), ((2, 3, 3, 2), 0)])
def test_reshapes_around_a_layer_are_removed(last: tuple[int, ...], count: int) -> None:
    module, x = Rows(last), torch.randn(2, 3, 4)
    program = _program(module, x)
    assert fuse_eager_operators(program) == count
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.reshape.default)) == 2 - 2 * count
    assert_same_results(program, module, [x], rtol=0, atol=0)


@pytest.mark.parametrize(("users", "count"), [(1, 1), (2, 0)])
def test_reshapes_around_a_row_parallel_layer_are_removed(users: int, count: int) -> None:
    """Its partial output is all-reduced, in whatever shape; unless the rows are used elsewhere too."""
    module, x = Rows((2, 3, 6)), torch.randn(2, 3, 4)
    program = _program(module, x, all_reduced=True, users=users)
    assert fuse_eager_operators(program) == count
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.reshape.default)) == 2 - 2 * count
    (reduced,) = program.graph.find_nodes(op="call_function", target=all_reduce)
    assert tuple(reduced.meta[FULL].shape) == ((2, 3, 6) if count else (6, 6))
    with simulated_group(2):  # whose all-reduce returns its input
        found = program(x)
    torch.testing.assert_close(found[0] if users > 1 else found, module(x), rtol=0, atol=0)


def _program(module: Rows, x: torch.Tensor, all_reduced: bool = False, users: int = 1) -> GraphModule:
    """A local program: operators, calls of layers, and perhaps an all-reduce with several users."""
    graph = torch.fx.Graph()
    reshape = torch.ops.aten.reshape.default
    inputs = graph.placeholder("x")
    rows = graph.call_function(reshape, (inputs, [-1, 4]))
    rows_out = graph.call_module("layer", (rows,))
    reduced = graph.call_function(all_reduce, (rows_out, "sum", "0")) if all_reduced else rows_out
    result = graph.call_function(reshape, (reduced, list(module.last)))
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (result, 2))
    graph.output(doubled if users == 1 else (doubled, reduced))
    for node, shape in ((inputs, x.shape), (rows, (6, 4)), (rows_out, (6, 6)), (result, module.last)):
        node.meta["val"] = torch.empty(shape, device="meta")
    if all_reduced:
        reduced.meta[FULL] = torch.empty(6, 6, device="meta")
    return GraphModule(module, graph)


def test_slices_of_everything_are_dropped() -> None:
    def sliced(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        everything = torch.ops.aten.slice.Tensor(x * 2, 1, 0, 9223372036854775807)
        part = torch.ops.aten.slice.Tensor(everything, 0, 1, 9223372036854775807)
        return part + 1, torch.ops.aten.slice.Tensor(x, 1, 0, 9223372036854775807)

    module, inputs = trace(sliced, [torch.rand(3, 4)]), [torch.rand(3, 4)]
    assert fuse_eager_operators(module) == 1, "an input that is returned is a view still"
    assert_same_results(module, sliced, inputs)
