"""``torch.autograd.Function`` inside a model: one node, with the author's backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capture.capturing import aten_of, names
from helpers.graphs import targets
from torch.utils.checkpoint import checkpoint

from paraxis.rules import rule_for


class _Double(torch.autograd.Function):
    """Its backward is not the derivative of its forward, on purpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 5


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.amax(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@pytest.mark.parametrize(("function", "pointwise"), [(_Double, True), (_Rows, False)])
def test_a_function_with_its_own_backward_is_one_node(function: Any, pointwise: bool) -> None:
    graph = aten_of(lambda w, x: function.apply(x @ w).relu(), torch.ones(4, 4))
    (custom,) = [t for t in targets(graph) if type(t).__name__ == "CustomFunction"]
    assert custom.pointwise is pointwise
    assert (rule_for(custom) is not None) == pointwise
    assert names(graph) == ["matmul", "relu"]


@pytest.mark.parametrize("depth", [1, 2])
def test_one_node_inside_activation_checkpointing(depth: int) -> None:
    """Also in nested regions: traced operator by operator it would have no gradient there."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return _Double.apply(x.sin()).relu()

    def again(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(body, x, use_reentrant=False) if depth == 2 else body(x)

    graph = aten_of(lambda w, x: checkpoint(again, x @ w, use_reentrant=False), torch.ones(4, 4, requires_grad=True))
    assert [type(t).__name__ for t in targets(graph)].count("CustomFunction") == 1
    assert names(graph) == ["matmul", "sin", "relu"]


def test_its_backward_is_the_authors() -> None:
    graph = aten_of(lambda w, x: _Double.apply(x @ w), torch.ones(4, 4))
    (custom,) = [t for t in targets(graph) if type(t).__name__ == "CustomFunction"]
    x = torch.randn(4, 4, requires_grad=True)
    result = custom(x)
    result = result[0] if isinstance(result, (tuple, list)) else result
    assert torch.equal(result, x * 2)
    result.sum().backward()
    assert torch.allclose(x.grad, x.detach().cos() * 5)  # type: ignore[arg-type]
