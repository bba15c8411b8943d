"""Jobs on worker processes: in order, within the ranks that there are, and none of them holds up the others."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from zoo import workers
from zoo.jobs import Record
from zoo.workers import Limits, Task, _Queue, run_all


def job(name: str, pool: Any, sign: str) -> Record:
    """What a worker runs here."""
    if name == "dies":
        os._exit(3)
    if name == "hangs":
        time.sleep(1000)
    return {"name": name, "status": sign, "ranks": pool.world_size}


def results(names: list[str], limits: Limits) -> tuple[bool, dict[str, Record]]:
    """Whether all have run, and the results by name."""
    found: dict[str, Record] = {}

    def note(record: Record) -> None:
        found[record["name"]] = record

    tasks = [Task(name, 2) for name in names]
    return run_all(tasks, "zoo.test_workers:job", limits, note, {"sign": "good"}), found


def test_tasks_are_handed_out_in_order_when_there_are_ranks_for_them() -> None:
    queue = _Queue([Task("a", 2), Task("b", 4), Task("c", 2)], Limits(workers=3, ranks=6, job=1.0, total=1000.0))
    first, second = queue.take(), queue.take()
    assert (first, second) == (Task("a", 2), Task("b", 4)) and not queue.empty
    assert first is not None
    queue.give_back(first)
    assert queue.take() == Task("c", 2) and queue.empty and queue.take() is None


def test_no_task_is_handed_out_when_the_time_is_up() -> None:
    queue = _Queue([Task("a", 2)], Limits(workers=1, ranks=2, job=1.0, total=0.0))
    assert queue.over and queue.take() is None and not queue.empty and queue.left() == 0.0


def test_a_worker_that_ends_is_replaced() -> None:
    all_run, found = results(["dies", "fine"], Limits(workers=1, ranks=2, job=60.0, total=1000.0))
    assert all_run and found["fine"] == {"name": "fine", "status": "good", "ranks": 2, "world": 2}
    assert found["dies"]["status"] == "failed" and "has ended" in found["dies"]["error"]


@pytest.mark.long
def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SPARE", 30.0)
    all_run, found = results(["hangs", "fine"], Limits(workers=1, ranks=2, job=1.0, total=1000.0))
    assert all_run and found["fine"]["status"] == "good" and "no result within 31 s" in found["hangs"]["error"]
    started = time.monotonic()
    all_run, found = results(["hangs", "fine"], Limits(workers=1, ranks=2, job=600.0, total=30.0))
    assert not all_run and not found and time.monotonic() - started < 60
