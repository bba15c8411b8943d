"""The steps of a diagram: one per layer, collective and run of operators; repeated blocks once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from models.tiny import build
from torch import nn
from torch._dynamo import reset

from paraxis.placement import PARTIAL, REPLICATE, Layout, Shard
from paraxis.plan import Plan
from paraxis.plan.memory import Sizes
from paraxis.plan.offline import plan_offline
from paraxis.report.steps import Section, Step, placement_text, sections_of, steps_of


@dataclass
class Made:
    """A plan, and its steps; the simulated ranks are gone."""

    plan: Plan
    steps: list[Step]
    sections: list[Section]


@pytest.fixture(scope="module")
def llama() -> Made:
    with plan_offline(build("llama-tied"), 4, None, {}, Sizes()) as planned:
        steps = steps_of(planned)
        made = Made(planned.plan, steps, sections_of(steps, planned))
    reset()
    return made


def test_steps_come_after_their_sources(llama: Made) -> None:
    assert all(source < step.number for step in llama.steps for source in step.sources)
    kinds = [step.kind for step in llama.steps]
    assert kinds.count("collective") == len(llama.plan.collectives)
    layers = {layer.name for layer in llama.plan.layers if layer.kind != "cross_entropy"}
    assert layers <= {step.module for step in llama.steps}


def test_outputs_have_placements_and_shapes(llama: Made) -> None:
    by_title = {step.title: step for step in llama.steps if step.module.startswith("model.layers.0.")}
    column, row = by_title["gate_proj"], by_title["down_proj"]
    assert (column.kind, column.sharding) == ("column", "sharded") and (row.kind, row.sharding) == ("row", "partial")
    assert column.global_shape == ("2", "8", "128") and column.local_shape == ("2", "8", "32")
    assert row.global_shape == row.local_shape == ("2", "8", "64")
    reduced = next(step for step in llama.steps if step.kind == "collective" and row.number in step.sources)
    assert reduced.sharding == "replicated" and reduced.reason == "partial output of a row-parallel layer"


def test_repeated_blocks_are_one_section(llama: Made) -> None:
    sections = llama.sections
    assert [(s.title, s.count) for s in sections] == [
        ("Before the blocks", 1),
        ("model.layers.0", 2),
        ("After the blocks", 1),
    ]
    names = [step.title for step in sections[1].steps]
    assert {"q_proj", "o_proj", "gate_proj", "all-reduce"} <= set(names)
    assert sections[1].external and all(step not in sections[1].steps for step in sections[1].external)


def test_placements_as_text() -> None:
    assert placement_text(REPLICATE, (8,)) == "replicated"
    assert placement_text(PARTIAL, (8,)).startswith("partial")
    assert placement_text(Shard.of(0, Layout.even(8, 2)), (8, 4)) == "sharded on dimension 0 (size 8) in even shards"
    uneven = placement_text(Shard.of(1, Layout.even(7, 2)), (8, 7))
    assert uneven == "sharded on dimension 1 (size 7) in uneven shards"
    packed = Layout.concat([(4, Layout.even(4, 2)), (8, Layout.even(8, 2))])
    assert placement_text(Shard.of(0, packed), (12,)) == "sharded on dimension 0 (size 12) in packed segments"


def test_a_module_without_blocks_is_one_section() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    with plan_offline(module, 2, None, {"example_inputs": {"input": torch.ones(2, 8)}}) as planned:
        kinds = [step.kind for step in steps_of(planned)]
    reset()
    assert kinds == ["column", "operators", "row", "collective"]
