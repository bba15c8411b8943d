"""Functions of integers inside captured graphs: their shapes, sizes that are values, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import vision_utils

from paraxis.compat import host_functions as host
from paraxis.compat.host_functions import FUNCTIONS, METHOD, HostFunctionError

GRIDS = [[[1, 4, 6]], [[1, 2, 2], [3, 4, 2]], [[2, 6, 4], [1, 4, 4], [1, 2, 8]]]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "get_vision_cu_seqlens": (),
    "get_vision_position_ids": (2,),
    "get_vision_window_index": (2, 32, 8),
    "get_vision_interpolation_indices_and_weights": (7,),
    "get_vision_nearest_position_ids": (7,),
}


def plain(name: str) -> Any:
    function = getattr(vision_utils, name)
    return getattr(function, "__wrapped__", function)


def call(name: str, grid: torch.Tensor) -> Any:
    grid = grid[:, 1:] if name == "get_vision_nearest_position_ids" else grid
    return getattr(vision_utils, name)(grid, *ARGUMENTS[name], kwargs={})


@pytest.fixture(autouse=True)
def adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, about in FUNCTIONS.items():
        function = host._Function(plain(name), *about)
        monkeypatch.setattr(vision_utils, name, host._adapted(function, torch.compiler.is_compiling))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_captured_call_returns_what_the_function_does(name: str) -> None:
    torch._dynamo.reset()

    def model(grid: torch.Tensor) -> Any:
        return call(name, grid)

    graph = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    for rows in GRIDS:
        torch.testing.assert_close(graph(torch.tensor(rows)), model(torch.tensor(rows)))
    torch._dynamo.reset()


def test_other_values_compile_nothing() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def model(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return x + vision_utils.get_vision_position_ids(grid, 2).sum(1, keepdim=True)

    graph = torch.compile(model, fullgraph=True, backend=counter)
    for size in (4, 6, 8, 10):
        x, grid = torch.randn(4 * size, 3), torch.tensor([[1, 4, size]])
        torch.testing.assert_close(graph(x, grid), model(x, grid))
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_what_a_caller_has_computed_already_is_taken() -> None:
    torch._dynamo.reset()
    graph = torch.compile(
        lambda grid, mine: vision_utils.get_vision_position_ids(grid, 2, kwargs={"position_ids": mine}),
        fullgraph=True,
        backend="eager",
    )
    mine = torch.arange(6)
    assert graph(torch.tensor(GRIDS[0]), mine) is mine or torch.equal(graph(torch.tensor(GRIDS[0]), mine), mine)


class Model(torch.nn.Module):
    axes = 4

    def get_rope_index(self, input_ids: torch.Tensor, image_grid_thw: Any = None) -> Any:
        count = int(input_ids.max())  # not of a fake tensor
        positions = torch.arange(input_ids.shape[1]).expand(self.axes, *input_ids.shape)
        return positions + count, torch.full((input_ids.shape[0], 1), count)


def test_positions_of_tokens_have_as_many_axes_as_for_text(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    function = host._Function(vars(Model)[METHOD], host._tokens(vars(Model)[METHOD]))
    monkeypatch.setattr(Model, METHOD, host._adapted(function, torch.compiler.is_compiling))
    model, ids = Model(), torch.tensor([[1, 5, 2], [3, 1, 2]])
    graph = torch.compile(lambda ids: model.get_rope_index(ids), fullgraph=True, backend="eager")
    found, expected = graph(ids), model.get_rope_index(ids)
    torch.testing.assert_close(found, expected)
    assert found[0].shape == (4, 2, 3)
    model.axes = 5
    with pytest.raises(HostFunctionError, match=r"get_rope_index returned a tensor \(5, 2, 3\)"):
        host._calls[max(host._calls)].run([ids])
