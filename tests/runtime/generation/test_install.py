"""The generation loop runs on GPUs with compiled programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.tiny import build
from transformers import DynamicCache, GenerationConfig

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


def test_a_mask_that_hides_nothing_is_left_out() -> None:
    """transformers before 5.18 passes one, with which a program that runs eagerly would attend."""
    model, found = build("llama", num_hidden_layers=1), []

    def plain(*args: Any, attention_mask: Any, **kwargs: Any) -> None:
        found.append(attention_mask)

    generation = Generation(ParallelExecutionCtx(current_device=torch.device("cpu")), Config(compile=None))
    config = GenerationConfig(use_cache=True)
    config._pad_token_tensor = None
    full = torch.ones(2, 3, dtype=torch.int64)
    padded = full.clone()
    padded[0, 0] = 0
    for mask in (full, padded):
        cache = DynamicCache(config=model.config)
        generation(model, plain, full, [], [], config, attention_mask=mask, past_key_values=cache)
    assert found[0] is None and found[1] is padded
