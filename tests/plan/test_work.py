"""The matmul work of a plan: of which towers, and how much of it the ranks share."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo.multimodal_cases import build

from paraxis import Plan, plan_model
from paraxis.plan.work import MatmulPlan, added, sharded_fraction, towers_of, work_text
from paraxis.report.page import _work


def test_work_of_a_module_is_added_up() -> None:
    work = added([("a", 100, 0.5), ("a", 50, 1.0), ("b", 10, 1.0), ("c", 0, 0.5)])
    assert work == [MatmulPlan("a", 150, 100, 100), MatmulPlan("b", 10, 0, 10)]
    assert sharded_fraction(work, "a") == 2 / 3 and sharded_fraction(work) == 100 / 160
    assert sharded_fraction(work, "none") == 1.0


def test_towers_are_around_blocks_and_beside_them() -> None:
    names = {
        "model.vision.patches": "model.vision",
        "model.vision.encoder.layers.0.mlp.fc1": "model.vision.encoder",
        "model.vision.encoder.layers.1.mlp.experts.3.up": "model.vision.encoder",
        "model.projector.linear": "model.projector",
        "model.language.layers.0.q": "model.language",
        "model.language.rope": "model.language",
        "head": "head",
    }
    found = towers_of([MatmulPlan(name, 10, 10, 5) for name in names])
    assert [t.name for t in found] == [
        "model.vision.patches",
        "model.vision.encoder",
        "model.projector",
        "model.language",
        "head",
    ]
    assert [t.flops for t in found] == [10, 20, 10, 20, 10]
    assert [t.has_blocks for t in found] == [False, True, False, True, False]
    assert all(t.sharded_fraction == 1.0 and t.local_fraction == 0.5 for t in found)
    (alone,) = towers_of([MatmulPlan("0", 4, 0, 4)])  # blocks of the model itself
    assert alone.name == "" and alone.local_fraction == 1.0


def test_a_plan_says_so_where_there_are_several_towers_or_work_is_replicated() -> None:
    decoder = [MatmulPlan("model.layers.0.q", 90, 90, 45), MatmulPlan("head", 10, 10, 5)]
    assert work_text(decoder) == ""
    replicated = [*decoder, MatmulPlan("router", 100, 0, 100)]
    parts = "model 100% (45% of all), head 100% (5% of all), router 0% (50% of all)"
    assert work_text(replicated) == f"Matmul work that the ranks share: 50.0%: {parts}."
    plan = Plan(2, matmuls=replicated)
    assert work_text(replicated) in plan.table().caption  # type: ignore[operator]
    assert Plan.from_json(plan.to_json()).matmuls == plan.matmuls
    assert "<td>router</td>" in _work(plan) and _work(Plan(2, matmuls=decoder)) == ""


class Half(nn.Module):
    """One of its matmuls is inside of what no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_work_is_that_of_the_model() -> None:
    plan = plan_model(Half(), 2, example_inputs=torch.ones(3, 16))
    assert [m.module for m in plan.matmuls] == ["up", "down"]
    assert {(m.flops, m.sharded, m.local) for m in plan.matmuls} == {(2 * 3 * 16 * 64, 2 * 3 * 16 * 64, 3 * 16 * 64)}


@pytest.mark.parametrize("name", ["llava:LlavaForConditionalGeneration"])
def test_vision_towers_share_their_work(name: str) -> None:
    """Left-out blocks count as those that they repeat."""
    plan = plan_model(build(name), 2)
    towers = {t.name: t for t in plan.towers}
    vision, language = towers["model.vision_tower.encoder"], towers["model.language_model"]
    assert vision.sharded_fraction > 0.9 and language.sharded_fraction > 0.9
    first, second = ([m for m in plan.matmuls if f"language_model.layers.{i}." in m.module] for i in (0, 1))
    assert [m.flops for m in first] == [m.flops for m in second] and first
