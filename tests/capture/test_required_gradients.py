"""``requires_grad_()`` on an intermediate result: dropped where nobody can tell, a graph break elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture.capturing import captured
from models.compare import max_difference, parallel_module
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from paraxis.capture.required_gradients import REQUIRES_GRAD, check_required_gradients
from paraxis.errors import GraphBreak


class _Frozen(nn.Module):
    """A frozen first layer, whose result a hook makes require a gradient, and a second one that is trained."""

    def __init__(self, after: Callable[..., Any] | None = None, trained: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.after = nn.Linear(4, 4), nn.Linear(4, 4), after
        self.first.requires_grad_(False)
        self.second.requires_grad_(trained)
        self.first.register_forward_hook(lambda module, args, output: (output.requires_grad_(True), None)[1])

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        assert hidden.requires_grad
        return self.second(hidden) if self.after is None else self.after(self, hidden)


def graph_of(model: nn.Module) -> GraphModule:
    return captured(model, torch.ones(2, 4))


def test_the_call_is_noted_on_the_node_and_dropped() -> None:
    graph = graph_of(_Frozen())
    noted = [node for node in graph.graph.nodes if REQUIRES_GRAD in node.meta]
    assert len(noted) == 1 and "linear" in str(noted[0].target)
    assert not any("requires_grad" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("of_model", [True, False])
def test_a_result_that_depends_on_a_trained_parameter_is_fine(of_model: bool) -> None:
    check_required_gradients(graph_of(_Frozen()), of_model, "block")


def test_a_result_of_a_submodule_must_require_a_gradient() -> None:
    graph = graph_of(_Frozen(trained=False))
    check_required_gradients(graph, True, "")
    with torch.no_grad():
        check_required_gradients(graph, False, "block")
    with pytest.raises(GraphBreak, match=r"block calls requires_grad_\(\) on a tensor \(2, 4\)"):
        check_required_gradients(graph, False, "block")


def test_a_call_inside_of_a_checkpointed_region_counts() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return (x.detach() * 2).requires_grad_()

    graph = graph_of(_Frozen(lambda self, hidden: checkpoint(region, hidden, use_reentrant=False), trained=False))
    with pytest.raises(GraphBreak):
        check_required_gradients(graph, False, "block")


_seen: list[torch.Tensor] = []


def _leaking(self: _Frozen, hidden: torch.Tensor) -> torch.Tensor:
    _seen.append(hidden)
    return self.second(hidden)


def reads_the_gradient() -> float:
    """The gradient of a tensor that the forward hands out besides its result, and of an unsharded model."""
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    model, unsharded, _ = parallel_module(lambda: _Frozen(_leaking), (x,))
    found = []
    for each in (model, unsharded):
        _seen.clear()
        each(x).square().sum().backward()
        found.append(_seen[-1].grad)
    return max_difference(*found)


def test_a_tensor_whose_gradient_can_be_read_has_it(ranks: Any) -> None:
    for error in ranks(2).run(reads_the_gradient):
        assert error < 1e-5
