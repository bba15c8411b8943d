"""Plans cached between runs, and plans that rank 0 makes for all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import context, parallel
from models.tiny import build
from zoo.cases import find
from zoo.check import differences, run

from paraxis import parallelize_model
from paraxis.plan import make
from paraxis.utils import disk_cache

SEARCHED, CACHED = True, False
BY_RANK0 = [SEARCHED, False]
PLANNED_ON_RANK0 = make._planned_on_rank0


def planned_again(folder: str, cache: str, **options: Any) -> tuple[bool, Any]:
    """Whether this rank had to plan the model, and the plan."""
    os.environ["PARAXIS_CACHE"] = cache
    try:
        _, ctx = parallel(folder, **options)
    finally:
        os.environ["PARAXIS_CACHE"] = ""
    return "capture" in ctx.timings, ctx.plan.to_json()


def difference_by_cached_plan(folder: str, cache: str) -> tuple[float, bool]:
    os.environ["PARAXIS_CACHE"] = cache
    try:
        model, ctx = parallel(folder)
    finally:
        os.environ["PARAXIS_CACHE"] = ""
    unsharded = type(model).from_pretrained(folder).eval()
    inputs = find("llama").inputs(unsharded)
    return differences(run(model, inputs), run(unsharded, inputs)), "capture" in ctx.timings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    path = tmp_path_factory.mktemp("model")
    find("llama").make().save_pretrained(path)  # type: ignore[operator]
    return str(path)


def test_a_second_run_uses_the_cached_plan(ranks: Any, folder: str, tmp_path: Path) -> None:
    cache = str(tmp_path)
    first = ranks(2).run(planned_again, folder, cache)
    assert [planned for planned, _ in first] == BY_RANK0
    (file,) = (tmp_path / "plans").iterdir()
    second = ranks(2).run(planned_again, folder, cache)
    assert second == [(CACHED, plan) for _, plan in first]
    assert ranks(2).run(difference_by_cached_plan, folder, cache) == [(pytest.approx(0, abs=1e-4), CACHED)] * 2

    # Whatever a plan depends on is part of its key.
    for options in ({"objective": "decode"}, {"torch_dtype": torch.float64}):
        assert ranks(2).run(planned_again, folder, cache, **options)[0][0] == SEARCHED, options
    assert len(list((tmp_path / "plans").iterdir())) == 3
    assert ranks(2).run(planned_again, folder, cache, cache_plans=False)[0][0] == SEARCHED

    # A file that is broken is no plan, and is written again.
    text = file.read_text()
    file.write_text(text[:100])
    assert [planned for planned, _ in ranks(2).run(planned_again, folder, cache)] == BY_RANK0
    assert file.read_text() == text


def test_a_cache_that_cannot_be_written_is_no_error(ranks: Any, folder: str, tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file in its place")
    assert [planned for planned, _ in ranks(2).run(planned_again, folder, str(tmp_path))] == BY_RANK0


def both_plans(folder: str) -> tuple[Any, Any]:
    """The plan that rank 0 makes for all ranks, and the one that every rank makes."""
    _, by_rank0 = parallel(folder)
    make._planned_on_rank0 = lambda *_: None  # type: ignore[assignment]
    try:
        _, by_all = parallel(folder)
    finally:
        make._planned_on_rank0 = PLANNED_ON_RANK0
    assert "capture" in by_all.timings
    return by_rank0.plan.to_json(), by_all.plan.to_json()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_rank0_plans_as_all_ranks_would(ranks: Any, kind: str, tmp_path: Path) -> None:
    find(kind).make().save_pretrained(tmp_path)  # type: ignore[operator]
    for by_rank0, by_all in ranks(2).run(both_plans, str(tmp_path)):
        assert by_rank0 == by_all


def train_without_a_forward_before() -> tuple[bool, float]:
    """A model that is in training, with dropout, when it is planned."""
    model = build("gpt2", resid_pdrop=0.1).train()
    ctx = context()
    parallelize_model(model, ctx)
    loss = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    loss.backward()
    return "capture" in ctx.timings, float(loss)


def test_planning_on_rank0_runs_no_collective(ranks: Any) -> None:
    (first, loss), (second, other) = ranks(2).run(train_without_a_forward_before, timeout=120)
    assert [first, second] == BY_RANK0 and loss == other


def error_of_constraints(folder: str, constraints: dict[str, str] | None) -> tuple[str, str]:
    """The error of every rank; without constraints, those of the ranks differ."""
    constraints = constraints or {"lm_head": ("column", "replicated")[dist.get_rank()]}
    try:
        parallel(folder, constraints=constraints)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_all_ranks_raise_the_error_of_planning(ranks: Any, folder: str) -> None:
    for kind, message in ranks(2).run(error_of_constraints, folder, {"model.layers.*.nothing": "row"}):
        assert kind == "ConstraintError" and "nothing" in message
    for _, message in ranks(2).run(error_of_constraints, folder, None):
        assert "rank 1" in message


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARAXIS_CACHE", "")
    assert disk_cache.directory("plans") is None
    monkeypatch.setenv("PARAXIS_CACHE", str(tmp_path / "own"))
    assert disk_cache.directory("plans") == tmp_path / "own" / "plans"
    monkeypatch.delenv("PARAXIS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.directory("plans") == tmp_path / "paraxis" / "plans"
