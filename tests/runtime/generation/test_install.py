"""The generation loop runs on GPUs with compiled programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paraxis.config import Config
from paraxis.context import ParallelExecutionCtx
from paraxis.runtime.generation.install import Generation, fast_generation


@pytest.mark.parametrize(
    ("device", "compile", "expected"),
    [("cuda", "inductor", True), ("cuda", None, False), ("cpu", "inductor", False), ("cpu", None, False)],
)
def test_where_the_loop_runs(device: str, compile: str | None, expected: bool) -> None:
    ctx = ParallelExecutionCtx(current_device=torch.device(device))
    assert fast_generation(ctx, Config(compile=compile)) is expected


def test_elsewhere_transformers_own_loop_gets_the_same_arguments() -> None:
    calls = []

    def plain(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "plain"

    generation = Generation(ParallelExecutionCtx(current_device=torch.device("cpu")), Config(compile="inductor"))
    passed = {"logits_processor": [], "stopping_criteria": [], "generation_config": None, "attention_mask": 1}
    assert generation(None, plain, "ids", **passed, streamer=5) == "plain"
    assert calls == [(("ids",), {**passed, "streamer": 5, "synced_gpus": False})]
