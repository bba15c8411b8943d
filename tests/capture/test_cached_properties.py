"""Cached properties are there before a model is captured."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from models.compare import context, max_difference
from torch import nn

from paraxis import parallelize_model
from paraxis.capture.cached_properties import compute_cached_properties


class Table:
    """What a module keeps to look tokens up in."""

    def __init__(self) -> None:
        self.counted = 0

    @cached_property
    def rows(self) -> torch.Tensor:
        """Sorting what a dictionary has cannot be traced."""
        self.counted += 1
        return torch.tensor(sorted({name: i for i, name in enumerate("cabd")}.values(), reverse=True))

    @cached_property
    def of_a_call(self) -> int:
        raise RuntimeError("there is no call yet")


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.same = Table(), None
        self.inside = nn.Linear(8, 8)
        self.embed = nn.Embedding(4, 8)

    @cached_property
    def scale(self) -> float:
        """A property of a module."""
        return float(torch.tensor(2.0).exp())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inside(self.embed(self.table.rows[ids])) * self.scale


def test_properties_of_modules_and_of_what_they_keep_are_computed_once() -> None:
    model = nn.Sequential(Mapped())
    model[0].same = model[0].table  # type: ignore[assignment]
    compute_cached_properties(model)
    compute_cached_properties(model)
    table: Any = model[0].table
    assert {"rows"} == table.__dict__.keys() - {"counted"} and table.counted == 1
    assert "scale" in model[0].__dict__


def graphs_and_difference() -> tuple[list[str], float]:
    """The graph breaks of the parallel model, and how far it is from the plain one."""
    ids, ctx = torch.tensor([[0, 3, 2]]), context()
    model = parallelize_model(Mapped(), ctx, example_inputs={"ids": ids}, show_progress=False)
    with torch.no_grad():
        return list(ctx.plan.breaks), max_difference(model(ids=ids), Mapped()(ids))


def test_a_model_with_cached_properties_is_one_graph_on_all_ranks(ranks: Any) -> None:
    for breaks, difference in ranks(2).run(graphs_and_difference):
        assert not breaks and difference < 1e-5
