"""Parameters that no plan has placed get the placement of the solution, once."""

from __future__ import annotations

import torch
from passes.small import TinyLM, inputs

from paraxis import Config, ParallelExecutionCtx
from paraxis.passes.place import PlaceParametersPass
from paraxis.passes.setting import Setting
from paraxis.placement import Shard
from paraxis.plan.apply import parameter_metas
from paraxis.plan.make import Searched, search_plan
from paraxis.plan.offline import simulated_group
from paraxis.weights.build import attach


def test_parameters_without_a_placement_get_the_solutions() -> None:
    with simulated_group(2) as group:
        ctx = ParallelExecutionCtx(group, torch.device("cpu"))
        model = TinyLM()
        attach(model, ctx)
        searched = search_plan(model, ctx, Config(), inputs())
        assert isinstance(searched, Searched)
        metas = parameter_metas(ctx)
        assert all(meta.placement is None for meta in metas.values()), "searching places nothing"
        PlaceParametersPass().run(searched.captured, ctx, Config())
        assert {name: meta.placement for name, meta in metas.items()} == searched.plan.placements
        assert metas["up.weight"].is_parallel and isinstance(metas["up.weight"].placement, Shard)
        other, metas["up.weight"].placement = metas["up.weight"].placement, metas["norm.bias"].placement
        PlaceParametersPass().run(searched.captured, ctx, Config())
        assert metas["up.weight"].placement != other, "a placed parameter keeps its placement"
    torch._dynamo.reset()


def test_placing_is_skipped_while_searching() -> None:
    assert PlaceParametersPass().applies(Setting()) and not PlaceParametersPass().applies(Setting(searching=True))
