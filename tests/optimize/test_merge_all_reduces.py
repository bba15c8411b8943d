"""Small all-reduces that do not depend on one another become one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from paraxis.distributed.operators import all_reduce, all_reduce_coalesced
from paraxis.graph.local_program import COLLECTIVE, FULL, INFO, Collective, ProgramInfo
from paraxis.optimize.merge_all_reduces import merge_all_reduces
from paraxis.plan.offline import simulated_group


def program(sizes: tuple[int, int] = (4, 4), dependent: bool = False, write: bool = False) -> GraphModule:
    """A local program with two all-reduces of so many elements."""
    graph, info = Graph(), ProgramInfo()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def reduce(node: Any, size: int, name: str) -> Any:
        reduced = graph.call_function(all_reduce, (node, "sum", "0"))
        reduced.meta[FULL] = torch.empty(size, device="meta")
        reduced.meta[COLLECTIVE] = Collective("all_reduce", name, (size,), "float32")
        info.collectives.append(reduced.meta[COLLECTIVE])
        return reduced

    first = reduce(x, sizes[0], "q_norm")
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (first, 2))
    if write:
        graph.call_function(torch.ops.aten.copy_.default, (y, x)).meta["writes"] = True
    second = reduce(scaled if dependent else y, sizes[1], "k_norm")
    graph.output((scaled, second))
    module = GraphModule({}, graph)
    module.meta[INFO] = info
    return module


def test_independent_all_reduces_are_merged() -> None:
    module = program()
    assert merge_all_reduces(module) == 1
    module.graph.lint()
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert all_reduce_coalesced in called and all_reduce not in called
    (collective,) = module.meta[INFO].collectives
    assert collective.module == "q_norm + k_norm"
    inputs = torch.rand(4), torch.rand(4)
    with simulated_group(2):  # whose all-reduce returns its input
        scaled, second = module(*inputs)
    torch.testing.assert_close((scaled, second), (inputs[0] * 2, inputs[1]))


@pytest.mark.parametrize(
    "options", [{"dependent": True}, {"write": True}, {"sizes": (4, 10**7)}], ids=["dependent", "write", "large"]
)
def test_dependent_or_large_all_reduces_and_writes_in_between_stay(options: dict[str, Any]) -> None:
    module = program(**options)
    assert merge_all_reduces(module) == 0 and len(module.meta[INFO].collectives) == 2
