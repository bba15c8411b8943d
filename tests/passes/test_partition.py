"""Partitioning: local sizes, one redistribution per missing version, writes that reach their shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paraxis.distributed.operators import REDISTRIBUTIONS, all_gather, all_reduce
from paraxis.passes.partition import is_random
from paraxis.plan.offline import plan_offline

aten = torch.ops.aten


def local_program(module: nn.Module, inputs: Any, ranks: int = 2, **options: Any) -> torch.fx.GraphModule:
    """The local program of the first of these simulated ranks."""
    try:
        with plan_offline(module, ranks, None, {"example_inputs": inputs, **options}) as planned:
            return planned.program("replace")
    finally:
        torch._dynamo.reset()


def redistributions(program: torch.fx.GraphModule) -> list[Any]:
    """The redistributions of a program, in order."""
    return [n.target for n in program.graph.nodes if n.op == "call_function" and n.target in REDISTRIBUTIONS]


class Heads(nn.Module):
    """Projections with a hard-coded number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        return self.down(self.up(x).view(b, s, 4, 8).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(b, s, 32))


@pytest.mark.parametrize("ranks", [2, 4])
def test_sizes_in_views_become_local(ranks: int) -> None:
    program = local_program(Heads(), torch.ones(2, 3, 16), ranks)
    views = [n.args[1] for n in program.graph.nodes if n.target in (aten.view.default, aten.reshape.default)]
    assert list(views[0]) == [2, 3, 4 // ranks, 8] and list(views[-1]) == [2, 3, 32 // ranks]
    assert redistributions(program) == [all_reduce]


class UsedTwice(nn.Module):
    """A sharded value whose full tensor is needed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.up(x)
        return torch.linalg.qr(y).R, torch.linalg.svdvals(y)


def test_missing_version_is_made_once() -> None:
    program = local_program(UsedTwice(), torch.ones(32, 16), constraints={"up": "column"})
    assert redistributions(program) == [all_gather]


class Buffer(nn.Module):
    """Writes into a tensor that the caller passes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        buffer[:, 0].copy_(self.up(x))
        return self.down(buffer.sum(1))


def test_write_into_an_input_of_the_caller_writes_the_full_tensor() -> None:
    program = local_program(Buffer(), (torch.ones(2, 16), torch.zeros(2, 4, 32)))
    (write,) = program.graph.find_nodes(op="call_function", target=aten.copy_.default)
    destination, source = write.args
    assert destination.args[0].op == "placeholder" and source.target is all_gather
    read = next(node for node in program.graph.nodes if "sum" in str(node.target))
    assert [*program.graph.nodes].index(write) < [*program.graph.nodes].index(read)


def test_random_operators_are_recognised_by_their_arguments() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    calls = {
        "dropout": (aten.dropout.default, (x, 0.5, True), True),
        "dropout that is off": (aten.dropout.default, (x, 0.5, False), False),
        "dropout of nothing": (aten.dropout.default, (x, 0.0, True), False),
        "attention": (aten.scaled_dot_product_attention.default, (x, x, x), False),
        "attention with dropout": (aten.scaled_dot_product_attention.default, (x, x, x, None, 0.1), True),
        "random numbers": (aten.rand_like.default, (x,), True),
        "relu": (aten.relu.default, (x,), False),
    }
    for name, (target, args, expected) in calls.items():
        assert is_random(graph.call_function(target, args)) is expected, name
