"""Solutions: run on one rank, or impossible."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from solver.programs import traced

from paraxis.placement import Shard
from paraxis.solver import CostModel, Program, Unsatisfiable, on_one_rank, search


@pytest.fixture
def program() -> Program:
    def two_layers(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.softmax(F.linear(F.relu(F.linear(x, a)), b), -1)

    return traced(two_layers, [torch.empty(4, 8)], [torch.empty(8, 8), torch.empty(8, 8)], 2)


def test_on_one_rank(program: Program) -> None:
    """One rank runs the plan of two: the same layers, of which it holds everything."""
    solution, _ = search(program, CostModel())
    alone = on_one_rank(solution)
    assert [s.kind for s in alone.strategies.values()] == [s.kind for s in solution.strategies.values()]
    for value, placement in alone.parameters.items():
        assert isinstance(placement, Shard) and list(placement.dims) == list(solution.parameters[value].dims)  # type: ignore[union-attr]
        assert all(x.world == 1 and x.local_size(8, 0) == 8 for x in placement.dims.values())
    assert all(s.localize is None for s in alone.strategies.values())


def test_unsatisfiable_names_the_operator(program: Program) -> None:
    with pytest.raises(Unsatisfiable, match="no way to run aten.linear.default is permitted") as error:
        search(program, CostModel(), permit=lambda step, strategy, before, after: "linear" not in str(step.node.target))
    assert error.value.step is program.steps[0]
