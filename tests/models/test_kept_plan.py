"""Plans that are kept between runs, and plans that one rank makes for all."""

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
from paraxis.plan import make as planning
from paraxis.utils import disk_cache as cache

PLANNED, REMEMBERED = True, False
BY_THE_FIRST = [PLANNED, False]
FIRST_FOR_ALL = planning._first_for_all


def planned_again(folder: str, cache: str, **options: Any) -> tuple[bool, Any]:
    """Whether this rank had to plan the model, and the plan."""
    os.environ["PARAXIS_CACHE"] = cache
    try:
        _, ctx = parallel(folder, **options)
    finally:
        os.environ["PARAXIS_CACHE"] = ""
    return "capture" in ctx.timings, ctx.plan.to_json()


def compared(folder: str, cache: str) -> tuple[float, bool]:
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


def test_the_second_time_it_is_remembered(ranks: Any, folder: str, tmp_path: Path) -> None:
    cache = str(tmp_path)
    first = ranks(2).run(planned_again, folder, cache)
    assert [planned for planned, _ in first] == BY_THE_FIRST
    (file,) = (tmp_path / "plans").iterdir()
    second = ranks(2).run(planned_again, folder, cache)
    assert second == [(REMEMBERED, plan) for _, plan in first]
    assert ranks(2).run(compared, folder, cache) == [(pytest.approx(0, abs=1e-4), REMEMBERED)] * 2

    # Whatever a plan depends on is part of its key.
    for options in ({"objective": "decode"}, {"torch_dtype": torch.float64}):
        assert ranks(2).run(planned_again, folder, cache, **options)[0][0] == PLANNED, options
    assert len(list((tmp_path / "plans").iterdir())) == 3
    assert ranks(2).run(planned_again, folder, cache, cache_plans=False)[0][0] == PLANNED

    # A file that is broken is no plan, and is written again.
    whole = file.read_text()
    file.write_text(whole[:100])
    assert [planned for planned, _ in ranks(2).run(planned_again, folder, cache)] == BY_THE_FIRST
    assert file.read_text() == whole


def test_a_directory_that_cannot_be_written(ranks: Any, folder: str, tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file in its place")
    assert [planned for planned, _ in ranks(2).run(planned_again, folder, str(tmp_path))] == BY_THE_FIRST


def each_by_itself(folder: str) -> tuple[Any, Any]:
    """The placements, as the first rank found them for all, and as every rank finds them."""
    _, together = parallel(folder)
    planning._first_for_all = lambda *_: False  # type: ignore[assignment]
    try:
        _, alone = parallel(folder)
    finally:
        planning._first_for_all = FIRST_FOR_ALL
    assert "capture" in alone.timings
    return together.plan.to_json(), alone.plan.to_json()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_the_first_plans_as_all_would(ranks: Any, kind: str, tmp_path: Path) -> None:
    find(kind).make().save_pretrained(tmp_path)  # type: ignore[operator]
    for together, alone in ranks(2).run(each_by_itself, str(tmp_path)):
        assert together == alone


def trained_at_once() -> tuple[bool, float]:
    """A model that is in training, with dropout, when it is planned."""
    model = build("gpt2", resid_pdrop=0.1).train()
    ctx = context()
    parallelize_model(model, ctx)
    loss = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    loss.backward()
    return "capture" in ctx.timings, float(loss)


def test_planning_alone_meets_nobody(ranks: Any) -> None:
    (first, loss), (second, other) = ranks(2).run(trained_at_once, timeout=120)
    assert [first, second] == BY_THE_FIRST and loss == other


def wished(folder: str, mine: dict[str, str] | None) -> tuple[str, str]:
    """What every rank says of a wish that cannot be, or of ranks with wishes that differ."""
    wishes = mine if mine is not None else {"lm_head": ("column", "whole")[dist.get_rank()]}
    try:
        parallel(folder, constraints=wishes)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_what_cannot_be_planned_is_said_by_all(ranks: Any, folder: str) -> None:
    for kind, message in ranks(2).run(wished, folder, {"model.layers.*.nothing": "row"}):
        assert kind == "ConstraintError" and "nothing" in message
    for _, message in ranks(2).run(wished, folder, None):
        assert "rank 1" in message


def test_where_plans_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARAXIS_CACHE", "")
    assert cache.directory("plans") is None
    monkeypatch.setenv("PARAXIS_CACHE", str(tmp_path / "own"))
    assert cache.directory("plans") == tmp_path / "own" / "plans"
    monkeypatch.delenv("PARAXIS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory("plans") == tmp_path / "paraxis" / "plans"
