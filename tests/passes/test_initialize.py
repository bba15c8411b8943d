"""Placed parameters get their shard, once, where the program will run."""

from __future__ import annotations

import pytest
import torch
from helpers.shards import local_shard
from passes.small import TinyLM, planned

from paraxis import Config
from paraxis.passes import InitializeOrLoadWeightsPass
from paraxis.passes.setting import Setting


@pytest.mark.parametrize("rank", [0, 1])
def test_parameters_get_the_shard_of_this_rank(rank: int) -> None:
    torch.manual_seed(0)
    weights = dict(TinyLM().named_parameters())
    with planned(rank=rank) as offline:
        InitializeOrLoadWeightsPass().run(offline.searched.captured, offline.ctx, Config())
        for name, parameter in offline.ctx.param_cache.items():
            expected = local_shard(weights[name], offline.plan.parameters[name].placement, rank)
            assert torch.equal(parameter.to_local(), expected), name  # type: ignore[attr-defined]
            parameter.to_local().zero_()  # type: ignore[attr-defined]
        InitializeOrLoadWeightsPass().run(offline.searched.captured, offline.ctx, Config())
        assert not any(p.to_local().any() for p in offline.ctx.param_cache.values()), "a second run loads nothing"  # type: ignore[attr-defined]


def test_weights_are_loaded_only_where_the_program_runs() -> None:
    step = InitializeOrLoadWeightsPass()
    assert step.applies(Setting())
    assert not step.applies(Setting(searching=True)) and not step.applies(Setting(simulated=True))
