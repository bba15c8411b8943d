"""Ranks that built different programs raise together instead of waiting for one another."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models.compare import context
from torch import nn
from torch.fx import Graph, GraphModule

import paraxis
from paraxis import Config
from paraxis.graph.local_program import INFO, Collective, ProgramInfo
from paraxis.passes.agree import AgreeOnProgramPass


def program(kind: str, order: list[str]) -> GraphModule:
    """A local program with one collective of this kind, and this order of operations."""
    graph = Graph()
    graph.output(graph.placeholder("x"))
    module = GraphModule({}, graph)
    module.meta[INFO] = ProgramInfo([Collective(kind, "model.down", (2, 4), "float32")], order)
    return module


def agree(kinds: tuple[str, str], orders: tuple[list[str], list[str]]) -> str:
    """The error of this rank, if there is one."""
    rank, ctx = dist.get_rank(), context()
    ctx.example_inputs = [torch.ones(2, 3 + rank), 7]
    try:
        module = program(kinds[rank], orders[rank])
        assert AgreeOnProgramPass().run(module, ctx, Config()) is module
    except RuntimeError as error:
        return str(error)
    return ""


class Normed(nn.Module):
    """A norm between two layers, whose epsilon and factor differ from rank to rank."""

    def __init__(self, eps: float, factor: float) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16, eps), nn.Linear(16, 8)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x) * self.factor))  # type: ignore[no-any-return]


def other_numbers(eps: float, factor: float, frozen: bool = False) -> str:
    """The error of this rank, whose module computes with numbers of its own, or has a frozen parameter of its own."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = Normed(1e-5 + rank * eps, 2.0 + rank * factor)
    try:
        model = paraxis.parallelize_model(module, context(), example_inputs=torch.ones(2, 8))
        if frozen:
            model.up.weight.requires_grad_(rank > 0)
            model(torch.ones(2, 8))
    except RuntimeError as error:
        return str(error)
    return ""


def test_other_numbers_raise_on_all_ranks(ranks: Any) -> None:
    assert ranks(2).run(other_numbers, 0.0, 0.0) == ["", ""]
    for message in ranks(2).run(other_numbers, 0.5, 0.0):
        assert "compute different things" in message and "0.50001) in norm" in message
    for message in ranks(2).run(other_numbers, 0.0, 1.0):
        assert "(3.0) in the model" in message and "(2.0) in the model" in message
    for message in ranks(2).run(other_numbers, 0.0, 0.0, True):
        assert "rank 0: none of these; rank 1: the gradient of up.weight" in message


def test_equal_programs_pass(ranks: Any) -> None:
    assert ranks(2).run(agree, ("all_reduce", "all_reduce"), (["a", "b"], ["a", "b"])) == ["", ""]


def test_other_collectives_or_another_order_raise_on_all_ranks(ranks: Any) -> None:
    for kinds, orders in (
        (("all_reduce", "all_gather"), (["a", "b"], ["a", "b"])),
        (("all_reduce", "all_reduce"), (["a", "b"], ["b", "a"])),
    ):
        messages = ranks(2).run(agree, kinds, orders)
        for rank, message in enumerate(messages):
            assert f"rank {rank} of 2" in message and "rank 0: (2, 3), 7; rank 1: (2, 4), 7" in message
