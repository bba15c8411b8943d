"""Ranks that built different programs raise together instead of waiting for one another."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models.compare import context
from torch.fx import Graph, GraphModule

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
