"""Functionalizing ATen graphs: mutations, constant indices, inactive operators and dead code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture.capturing import aten_of, captured_with_inputs, names, node_of
from helpers.graphs import targets
from torch import nn

from paraxis.capture import simplify, to_aten
from paraxis.graph.mutation import IN_PLACE, written_input

aten = torch.ops.aten


def test_mutation_of_an_intermediate_becomes_a_new_value() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        y.add_(1)
        y.mul_(w)
        return y.relu()

    graph = aten_of(function, torch.ones(4, 4))
    assert names(graph) == ["matmul", "add", "mul", "relu"]
    assert not any(n.meta.get("impure") for n in graph.graph.nodes)
    assert node_of(graph, aten.relu.default).args[0] is node_of(graph, aten.mul.Tensor)


def test_mutation_through_a_later_view_stays_impure() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        y.add_(1)
        y[:, :2].mul_(3)
        return y.relu()

    graph = aten_of(function, torch.ones(4, 4))
    assert {"add", "mul_"} <= set(names(graph))
    assert node_of(graph, aten.add.Tensor).meta.get("impure") and node_of(graph, aten.slice.Tensor).meta.get("impure")
    assert not node_of(graph, aten.matmul.default).meta.get("impure")


def test_uses_before_the_mutation_see_the_old_value() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        before = y.relu()
        y.add_(1)
        return before + y.sigmoid()

    graph = aten_of(function, torch.ones(4, 4))
    product, added = node_of(graph, aten.matmul.default), node_of(graph, aten.add.Tensor)
    assert node_of(graph, aten.relu.default).args[0] is product
    assert node_of(graph, aten.sigmoid.default).args[0] is added


def test_mutation_through_a_view_marks_all_aliases() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        part = y[:, :2]
        part.add_(1)
        return y.relu()

    graph = aten_of(function, torch.ones(4, 4))
    impure = {str(n.target) for n in graph.graph.nodes if n.meta.get("impure")}
    assert {"aten.matmul.default", "aten.slice.Tensor", "aten.add_.Tensor"} <= impure
    assert not node_of(graph, aten.relu.default).meta.get("impure")


def test_mutation_while_a_view_is_in_use_stays_impure() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        seen = y.view(2, 8)
        y.add_(1)
        return seen.relu()

    graph = aten_of(function, torch.ones(4, 4))
    assert aten.add_.Tensor in targets(graph)
    for target in (aten.matmul.default, aten.view.default, aten.add_.Tensor):
        assert node_of(graph, target).meta.get("impure"), target


def test_mutation_of_an_input_records_the_mutating_operator() -> None:
    """The graph has the operator that returns the new value; the mutating one is in its metadata."""

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y = x @ w
        x.mul_(2)
        return y + x

    graph = aten_of(function, torch.ones(4, 4))
    for pure, writing in ((aten.add.Tensor, aten.add_.Tensor), (aten.mul.Tensor, aten.mul_.Tensor)):
        node = node_of(graph, pure)
        assert node.meta.get(IN_PLACE) is writing and not node.meta.get("impure")
        assert written_input(node) is not None


def test_mutation_of_an_input_with_an_older_view_stays_impure() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        view = x[:, :2]
        x.add_(1)
        return view @ w[:2]

    graph = aten_of(function, torch.ones(4, 4))
    node = node_of(graph, aten.add_.Tensor)
    assert node.meta.get("impure") and IN_PLACE not in node.meta


class WritesSlices(nn.Module):
    """Fills a tensor slice by slice, in place, as attention code does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(*x.shape[:-1], 10)
        out[..., :4].copy_(self.first(x))
        out[..., 4:] = self.second(x)
        out[0] = 1.0
        return out * 2


class WritesUnderAnotherView(nn.Module):
    """The slice that is written to is read through an earlier view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(3, 4)
        row = out[1]
        out[:, :2].copy_(x)
        return row + out.sum(0)


@pytest.mark.parametrize(
    ("make", "shape", "pure"), [(WritesSlices, (2, 3, 8), True), (WritesUnderAnotherView, (3, 2), False)]
)
def test_slice_writes_become_new_values(make: Any, shape: tuple[int, ...], pure: bool) -> None:
    """Unless an earlier view of the same memory is read later."""
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    graph, inputs = captured_with_inputs(module, x)
    aten = simplify(to_aten(graph))
    impure = [n for n in aten.graph.nodes if n.meta.get("impure")]
    assert bool(impure) != pure, impure
    (result,) = aten(*inputs)
    assert torch.equal(result, module(x))


@pytest.mark.parametrize(
    ("index", "expected"),
    [([1, 2], (1, 1, 3)), ([-1], (1, 3, 4)), ([0, 1, 2, 3], (1, 0, 4)), ([2, 1], None), ([0, 2], None)],
)
def test_consecutive_constant_indices_become_a_slice(index: list[int], expected: tuple[int, int, int] | None) -> None:
    graph = aten_of(lambda w, x: x[:, index] * 2, torch.ones(4, 4))
    if expected is None:
        assert aten.index.Tensor in targets(graph)
    else:
        assert aten.index.Tensor not in targets(graph)
        assert node_of(graph, aten.slice.Tensor).args[1:] == expected


def test_an_index_that_is_an_input_stays() -> None:
    graph = aten_of(lambda w, x, i: x[:, i], torch.ones(4, 4), torch.tensor([1, 2]))
    assert aten.index.Tensor in targets(graph)


@pytest.mark.parametrize(("p", "train", "stays"), [(0.5, False, False), (0.0, True, False), (0.5, True, True)])
def test_inactive_dropout_is_removed(p: float, train: bool, stays: bool) -> None:
    graph = aten_of(lambda w, x: F.dropout(x @ w, p, train) + 1, torch.ones(4, 4))
    assert (aten.dropout.default in targets(graph)) == stays


def test_dead_code_is_removed_but_not_random_operators() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        _ = x.sin()
        _ = torch.rand_like(x)
        return x @ w

    found = names(aten_of(function, torch.ones(4, 4)))
    assert "sin" not in found and "rand_like" in found
