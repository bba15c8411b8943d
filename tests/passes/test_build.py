"""Building a program: the pipeline runs with all ranks in step, and holds no data of the inputs afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import parallel_module
from torch import nn
from torch.fx import GraphModule

from paraxis import Config
from paraxis.passes import PassBase, build_parallel_pass_pipeline
from paraxis.passes.build import build_program
from paraxis.plan.offline import Planned


class FailsOnRank1(PassBase):
    """A pass that raises on one rank."""

    def run(self, graph_module: GraphModule, ctx: Any, config: Any) -> GraphModule:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in a pass")
        return graph_module


def fail_in_a_pass() -> str:
    """The error of this rank."""
    pipeline = build_parallel_pass_pipeline()
    pipeline.insert_before("agree", FailsOnRank1())
    with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
        parallel_module(lambda: nn.Linear(8, 8), torch.ones(2, 8), pipeline=pipeline)
    return str(caught.value)


def test_pass_that_fails_on_one_rank_fails_on_all(ranks: Any) -> None:
    for message in ranks(2).run(fail_in_a_pass):
        assert "in a pass" in message


def test_inputs_are_released_after_building(offline: Planned) -> None:
    inputs = [torch.ones(x.shape) if type(x) is torch.Tensor else x for x in offline.searched.inputs]
    with torch.no_grad():
        program = build_program(offline.searched.captured, inputs, offline.ctx, Config())
    assert offline.ctx.last_optimized_graph_module is program
    plain = [x for x in offline.ctx.example_inputs if not isinstance(x, nn.Parameter)]
    assert plain and all(x.device.type == "meta" for x in plain if isinstance(x, torch.Tensor))


def test_observer_sees_every_pass_that_ran(offline: Planned) -> None:
    seen: list[str] = []
    with torch.no_grad():
        build_program(
            offline.searched.captured,
            offline.searched.inputs,
            offline.ctx,
            Config(),
            lambda step, program: seen.append(step.title),
        )
    assert seen[:4] == ["solve", "annotate", "place", "replace"] and "initialize" not in seen, "ranks are simulated"
