"""Many jobs at once on a machine with many cores: worker processes, each with its own ranks and a time limit per job.

A worker that does not answer in time is killed with its ranks and replaced by another one: no job can hold up the
others, whatever it does. Results go to the caller as they come, so that the run may be killed at any moment.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ranks import RankPool
from zoo.jobs import Record

SPARE = 60.0
"""Seconds that a worker has beside the time limit of a job, for building the model and starting its ranks."""


@dataclass(frozen=True)
class Task:
    """A job: a model on a number of ranks."""

    name: str
    world: int


@dataclass(frozen=True)
class Limits:
    """How much may run at once, and for how long."""

    workers: int
    """Jobs at a time."""
    ranks: int
    """Ranks at a time, of all jobs together."""
    job: float
    """Seconds of a job on its ranks."""
    total: float
    """Seconds of all; jobs that are running then are killed."""


def run_all(
    tasks: Sequence[Task], function: str, limits: Limits, on_result: Callable[[Record], None], options: Record
) -> bool:
    """Run ``module:function(name, pool, **options)`` for every task in this order; whether all have run.

    ``on_result`` gets each record with its ``world``, one at a time.
    """
    queue = _Queue(tasks, limits)
    killed = _Killed()
    lock = threading.Lock()

    def drive() -> None:
        worker: _Worker | None = None
        try:
            while (task := queue.take()) is not None:
                worker = worker or _Worker(function, options)
                killed.watch(worker)
                record = worker.run(task, min(limits.job + SPARE, queue.left()))
                if not worker.alive:
                    worker = None
                queue.give_back(task)
                if record is not None and not queue.over:
                    with lock:
                        on_result({**record, "world": task.world})
        finally:
            if worker is not None:
                worker.kill()

    threads = [threading.Thread(target=drive, daemon=True) for _ in range(limits.workers)]
    previous = signal.signal(signal.SIGTERM, lambda *_: killed.kill_all())
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
    finally:
        signal.signal(signal.SIGTERM, previous)
        killed.kill_workers()
    return queue.empty


class _Queue:
    """The tasks in order; one is handed out when there are ranks for it."""

    def __init__(self, tasks: Sequence[Task], limits: Limits) -> None:
        self._tasks = list(tasks)
        self._free = limits.ranks
        self._changed = threading.Condition()
        self._end = time.monotonic() + limits.total

    @property
    def empty(self) -> bool:
        """Whether all tasks were handed out."""
        return not self._tasks

    @property
    def over(self) -> bool:
        """Whether the time of all is up."""
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Seconds until the time of all is up."""
        return max(0.0, self._end - time.monotonic())

    def take(self) -> Task | None:
        """The next task, after waiting for its ranks; None if there is none or no time."""
        with self._changed:
            while self._tasks and not self.over:
                if self._tasks[0].world <= self._free:
                    self._free -= self._tasks[0].world
                    return self._tasks.pop(0)
                self._changed.wait(1.0)
        return None

    def give_back(self, task: Task) -> None:
        """The ranks of a task are free again."""
        with self._changed:
            self._free += task.world
            self._changed.notify_all()


class _Killed:
    """The workers that must not outlive this process."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def watch(self, worker: _Worker) -> None:
        """Remember a worker."""
        if worker not in self._workers:
            self._workers.append(worker)

    def kill_workers(self) -> None:
        """Kill all workers with their ranks."""
        for worker in self._workers:
            worker.kill()

    def kill_all(self) -> None:
        """End this process and all workers, at once."""
        self.kill_workers()
        os._exit(1)


class _Worker:
    """A process that runs one job after another, on ranks that it keeps; all of them are one process group."""

    def __init__(self, function: str, options: Record) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function, options, list(sys.path)))
        self._process.start()
        theirs.close()
        self.alive = True

    def run(self, task: Task, timeout: float) -> Record | None:
        """The result of a task; None if the worker was killed from outside. A worker that failed is dead after this."""
        failed = {"name": task.name, "status": "failed", "seconds": timeout}
        try:
            self._pipe.send(task)
            if self._pipe.poll(timeout):
                record: Record = self._pipe.recv()
                return record
        except (EOFError, OSError):
            self.kill()
            return {**failed, "error": "EOFError: the process that builds the model has ended"}
        self.kill()
        return {**failed, "error": f"RankTimeout: no result within {timeout:.0f} s"}

    def kill(self) -> None:
        """Kill the process and its ranks."""
        self.alive = False
        if self._process.pid is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or has not become the leader of its group yet
            self._process.kill()


def _serve(pipe: Connection, function: str, options: Record, path: list[str]) -> None:
    """The main function of a worker."""
    os.setpgid(0, 0)
    sys.path[:] = path
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, _, name = function.partition(":")
    call: Any = getattr(importlib.import_module(module), name)
    pools: dict[int, RankPool] = {}
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            break
        pool = pools.setdefault(task.world, RankPool(task.world))
        pipe.send(call(task.name, pool, **options))
    for pool in pools.values():
        pool.close()


def _end_with_parent() -> None:
    """End this worker and its ranks with the process that started it, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
