"""Plans are cached between runs, under a key of all they depend on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import max_difference, parallel, reference

SEARCHED, CACHED = True, False
BY_RANK0 = [SEARCHED, False]
"""Rank 0 searches for all ranks."""


def plan_with_cache(folder: str, cache: str, **options: Any) -> tuple[bool, Any]:
    """Whether this rank had to plan the model, and the plan."""
    os.environ["PARAXIS_CACHE"] = cache
    try:
        _, ctx = parallel(folder, **options)
    finally:
        os.environ["PARAXIS_CACHE"] = ""
    return "capture" in ctx.timings, ctx.plan.to_json()


def run_by_cached_plan(folder: str, cache: str) -> tuple[float, bool]:
    """The error of the logits, and whether this rank had to plan the model."""
    os.environ["PARAXIS_CACHE"] = cache
    try:
        model, ctx = parallel(folder)
    finally:
        os.environ["PARAXIS_CACHE"] = ""
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        error = max_difference(model(input_ids=ids).logits, reference(folder)(input_ids=ids).logits)
    return error, "capture" in ctx.timings


@pytest.fixture
def folder(checkpoints: Any) -> str:
    return checkpoints("llama")


def test_a_second_run_uses_the_cached_plan(ranks: Any, folder: str, tmp_path: Path) -> None:
    cache = str(tmp_path)
    first = ranks(2).run(plan_with_cache, folder, cache)
    assert [planned for planned, _ in first] == BY_RANK0
    (file,) = (tmp_path / "plans").iterdir()
    second = ranks(2).run(plan_with_cache, folder, cache)
    assert second == [(CACHED, plan) for _, plan in first]
    assert ranks(2).run(run_by_cached_plan, folder, cache) == [(pytest.approx(0, abs=1e-4), CACHED)] * 2

    # Whatever a plan depends on is part of its key.
    for options in ({"objective": "decode"}, {"torch_dtype": torch.float64}):
        assert ranks(2).run(plan_with_cache, folder, cache, **options)[0][0] == SEARCHED, options
    assert len(list((tmp_path / "plans").iterdir())) == 3
    assert ranks(2).run(plan_with_cache, folder, cache, cache_plans=False)[0][0] == SEARCHED

    # A truncated file is ignored and written again.
    text = file.read_text()
    file.write_text(text[:100])
    assert [planned for planned, _ in ranks(2).run(plan_with_cache, folder, cache)] == BY_RANK0
    assert file.read_text() == text


def test_a_cache_that_cannot_be_written_is_no_error(ranks: Any, folder: str, tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file in its place")
    assert [planned for planned, _ in ranks(2).run(plan_with_cache, folder, str(tmp_path))] == BY_RANK0
