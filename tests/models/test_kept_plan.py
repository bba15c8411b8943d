"""Plans that are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import parallel
from zoo.cases import find
from zoo.check import differences, run

from paraxis import cache

PLANNED, REMEMBERED = True, False


def planned_again(folder: str, cache: str, **options: Any) -> tuple[bool, Any]:
    """Whether the model had to be planned, and its plan."""
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
    assert [planned for planned, _ in first] == [PLANNED, PLANNED]
    (file,) = (tmp_path / "plans").iterdir()
    second = ranks(2).run(planned_again, folder, cache)
    assert second == [(REMEMBERED, plan) for _, plan in first]
    assert ranks(2).run(compared, folder, cache) == [(pytest.approx(0, abs=1e-4), REMEMBERED)] * 2

    # Whatever a plan depends on is part of its key.
    for options in ({"objective": "decode"}, {"torch_dtype": torch.float64}):
        assert all(planned for planned, _ in ranks(2).run(planned_again, folder, cache, **options)), options
    assert len(list((tmp_path / "plans").iterdir())) == 3
    assert ranks(2).run(planned_again, folder, cache, keep_plans=False)[0][0] == PLANNED

    # A file that is broken is no plan, and is written again.
    whole = file.read_text()
    file.write_text(whole[:100])
    assert [planned for planned, _ in ranks(2).run(planned_again, folder, cache)] == [PLANNED, PLANNED]
    assert file.read_text() == whole


def test_a_directory_that_cannot_be_written(ranks: Any, folder: str, tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file in its place")
    assert all(planned for planned, _ in ranks(2).run(planned_again, folder, str(tmp_path)))


def test_where_plans_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARAXIS_CACHE", "")
    assert cache.directory("plans") is None
    monkeypatch.setenv("PARAXIS_CACHE", str(tmp_path / "own"))
    assert cache.directory("plans") == tmp_path / "own" / "plans"
    monkeypatch.delenv("PARAXIS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory("plans") == tmp_path / "paraxis" / "plans"
