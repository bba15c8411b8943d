"""How many kernels a program launches when Python runs it: on one rank no more than the model itself does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.compare import parallel, reference
from torch.utils._python_dispatch import TorchDispatchMode

from paraxis.passes.base import PassPipeline, Rewrite
from paraxis.passes.pipeline import build_parallel_pass_pipeline
from ranks import RankPool

Ranks = Callable[[int], RankPool]

NO_KERNEL = (
    {"view", "reshape", "_unsafe_view", "transpose", "t", "permute", "slice", "select", "expand", "unsqueeze"}
    | {"squeeze", "alias", "detach", "split", "split_with_sizes", "chunk", "unbind", "as_strided"}
    | {"lift_fresh", "lift_fresh_copy"}  # of the empty tensors that a new KV cache starts from
)
"""Operators that launch nothing."""


class Launches(TorchDispatchMode):
    """Counts the operators that launch a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_KERNEL:
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


def launches(model: Any) -> tuple[Counter[str], Counter[str]]:
    """Of a prefill and of a decode step, both compiled before."""
    ids = torch.arange(10, 26)[None]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        for step in range(3):
            model(ids[:, step : step + 1], past_key_values=cache, use_cache=True)
        with Launches() as prefill:
            model(ids, use_cache=True)
        with Launches() as decode:
            model(ids[:, 3:4], past_key_values=cache, use_cache=True)
    return prefill.counted, decode.counted


def compared(folder: str) -> list[tuple[Counter[str], Counter[str]]]:
    """(launches of the unsharded model, of the parallel one) in prefill and decode, without the kernels for CPUs."""
    passes = [
        each
        for each in build_parallel_pass_pipeline()
        if not (isinstance(each, Rewrite) and each.name.startswith(("cpu_", "experts_in_sequence")))
    ]
    model, _ = parallel(folder, pipeline=PassPipeline(passes), compile=None, dtype=torch.bfloat16)
    unsharded = reference(folder, dtype=torch.bfloat16)
    return list(zip(launches(unsharded), launches(model.eval()), strict=True))


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3", "gemma2", "mixtral"))]
)
def test_one_rank_launches_no_more_kernels_than_the_model(name: str, ranks: Ranks, checkpoints: Any) -> None:
    (phases,) = ranks(1).run(compared, checkpoints(name))
    for expected, found in phases:
        assert found.total() <= expected.total(), (found - expected, expected - found)
