"""Writing a plan down: placements with reasons, unused parameters, repeated blocks."""

from __future__ import annotations

import pytest
import torch
from passes.small import planned
from torch import nn

from paraxis import plan_model
from paraxis.placement import REPLICATE, Layout, Shard
from paraxis.plan.build import PlanBuilder, shard_for_memory


@pytest.mark.parametrize(
    ("shape", "world", "dim"),
    [((8, 6), 2, 0), ((7, 6), 2, 1), ((7, 5), 2, 0), ((1, 2), 4, None), ((8,), 2, None), ((8, 6), 1, None)],
)
def test_unused_parameters_are_sharded_where_sizes_allow_it(
    shape: tuple[int, ...], world: int, dim: int | None
) -> None:
    """On a divisible dimension, or else on a long one; vectors stay replicated."""
    found = shard_for_memory(shape, world)
    assert found == (REPLICATE if dim is None else Shard.of(dim, Layout.even(shape[dim], world)))


def test_builder_collects_parameters_with_reasons() -> None:
    builder = PlanBuilder(2)
    builder.add_parameter("a.weight", Shard.of(0, Layout.even(8, 2)), (8, 4))
    builder.add_parameter("a.bias", REPLICATE, (8,), "a vector")
    builder.add_unused({"a.weight": (8, 4), "b.weight": (6, 4), "b.bias": (6,)})
    plan = builder.build()
    assert plan.parameters["a.weight"].local_shape == (4, 4) and plan.parameters["b.weight"].local_shape == (3, 4)
    assert list(plan.unplanned) == ["b.weight", "b.bias"]
    assert [name for name, _ in plan.replicated] == ["a.bias", "b.bias"]


def test_builder_continues_a_plan() -> None:
    with planned() as found:
        plan = found.plan
    again = PlanBuilder.of(plan, 2)
    again.add_parameter("adapter", REPLICATE, (4, 4), "added later")
    longer = again.build()
    assert longer.layers == plan.layers and longer.collectives == plan.collectives and longer.cost == plan.cost
    assert dict(longer.replicated)["adapter"] == "added later" and "adapter" not in plan.parameters


class Odd(nn.Module):
    """Parameters that stay replicated, for different reasons."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 32)
        self.square = nn.Parameter(torch.eye(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x @ torch.linalg.qr(self.square)[0]))


def test_replicated_parameters_and_gathered_tensors_have_reasons() -> None:
    plan = plan_model(Odd(), 2, example_inputs=torch.ones(4, 16))
    reasons = dict(plan.replicated)
    assert "vector" in reasons["norm.weight"] and "linalg_qr" in reasons["square"]
    torch._dynamo.reset()


class Spare(nn.Module):
    """A head whose results nobody reads, and one that a second kind of call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, head: bool = False) -> torch.Tensor:
        self.spare(x).relu()
        found = self.head(self.body(x))
        return found if head else self.body(x)


def test_what_nobody_reads_is_left_to_other_calls_and_sharded_for_memory() -> None:
    x = torch.ones(64, 8)
    plan = plan_model(Spare(), 2, example_inputs={"x": x})
    assert set(plan.unplanned) == {"head.weight", "head.bias", "spare.weight", "spare.bias"}
    assert plan.sharded_fraction < 0.6
    both = plan_model(Spare(), 2, example_inputs=[{"x": x}, {"x": x, "head": True}])
    assert set(both.unplanned) == {"spare.weight", "spare.bias"}
