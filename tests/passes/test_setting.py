"""The setting of a program: gradients, compiler, device, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from paraxis import Config
from paraxis.passes.setting import Setting, inductor_options, obstacle, setting_of
from paraxis.plan.offline import Planned


def test_setting_of_follows_gradients_compiler_and_state(offline: Planned) -> None:
    graph, ctx = offline.searched.captured, offline.ctx
    with torch.no_grad():
        assert setting_of(graph, ctx, Config()) == Setting(simulated=True, ranks=2)
    with torch.enable_grad():
        assert setting_of(graph, ctx, Config(compile="inductor")) == Setting(
            simulated=True, ranks=2, grad=True, compiled=True
        )


def test_derived_properties() -> None:
    assert Setting().runs and Setting().eager and Setting().inference and not Setting().lifts
    assert not Setting(searching=True).runs and not Setting(simulated=True).runs
    assert not Setting(grad=True).inference
    assert Setting(compiled=True).lifts and not Setting(compiled=True, random=True).lifts


@pytest.mark.parametrize(("device", "expected"), [("cpu", ""), ("cuda", "gloo's collectives cannot be captured")])
def test_gloo_on_a_gpu_prevents_cuda_graphs(offline: Planned, device: str, expected: str) -> None:
    ctx = replace(offline.ctx, current_device=torch.device(device))
    config = Config(mode="reduce-overhead", compile="inductor")
    with mock.patch("paraxis.passes.setting.backend_of", return_value="gloo"):
        assert obstacle(ctx, config) == expected
        assert bool(inductor_options(ctx, config).get("triton.cudagraphs")) is not bool(expected)
