"""Partial sums are all-reduced in their memory where nothing else reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

from paraxis.distributed.operators import all_reduce
from paraxis.kernels.cpu.gemv import linear
from paraxis.optimize.eager_collectives import reduced, run_all_reduces_in_place

aten = torch.ops.aten


def program(matmul: Any = aten.linear.default, read: bool = False) -> GraphModule:
    """A linear layer whose result is all-reduced, and read once more."""
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    partial = graph.call_function(matmul, (x, weight))
    total = graph.call_function(all_reduce, (partial, "sum", "0"))
    graph.output((total, partial) if read else total)
    return GraphModule({}, graph)


@pytest.mark.parametrize("matmul", [aten.linear.default, aten.mm.default, linear])
def test_results_of_matmuls_are_reduced_in_place(matmul: Any) -> None:
    module = program(matmul)
    assert run_all_reduces_in_place(module) == 1
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [matmul, reduced]


@pytest.mark.parametrize("options", [{"read": True}, {"matmul": aten.add.Tensor}, {"matmul": aten.view.default}])
def test_others_stay(options: dict[str, Any]) -> None:
    assert run_all_reduces_in_place(program(**options)) == 0


def on_a_rank() -> list[bool]:
    """Whether the program gives the sum, on every memory: shared with other ranks, and the backend's own."""
    from unittest.mock import patch

    from paraxis.distributed import collectives

    rank, group = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    inputs = torch.arange(6.0).view(2, 3) + rank, torch.arange(12.0).view(4, 3)
    expected = sum((torch.arange(6.0).view(2, 3) + r) @ inputs[1].T for r in range(dist.get_world_size()))
    found = []
    for patched in (False, True):
        module = program()
        for node in module.graph.find_nodes(op="call_function", target=all_reduce):
            node.args = (node.args[0], "sum", group)
        assert run_all_reduces_in_place(module) == 1
        with patch.object(collectives, "_host", lambda *_: None) if patched else torch.no_grad(), torch.no_grad():
            found.append(torch.equal(module(*inputs), expected))  # type: ignore[arg-type]
            transposed = inputs[0].clone().T
            largest = reduced(transposed, "max", group)
            found.append(torch.equal(largest, inputs[0].T - rank + dist.get_world_size() - 1))
    return found


def test_sums_over_ranks(ranks: Callable[[int], Any]) -> None:
    assert ranks(2).run(on_a_rank) == [[True] * 4] * 2
