"""Real ranks for tests: processes on this machine that share a gloo group over loopback.

Two ways to run a function on N ranks:

- `RankPool(n).run(fn, *args, **kwargs)` for what is expected to work. The processes start once and serve
  all calls, so that a test costs milliseconds and not the seconds it takes to import torch. Tests get the
  session's pools from the fixture `ranks`.
- `spawn_ranks(n, fn, *args, **kwargs)` for what is expected to fail. The processes are new and always
  terminated; the result says how each of them ended.

`fn` is a module-level function, sent by name; arguments and results are sent by value.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rank_worker import Job, Report, serve

TESTS_DIR = Path(__file__).resolve().parent

os.environ["PARAXIS_CACHE"] = ""  # no plan comes from the cache on disk

START_TIMEOUT = 180.0
"""Seconds for the processes to import torch and join the group."""
GRACE = 2.0
"""Seconds the other ranks have to report once one has failed."""
EXIT_GRACE = 10.0
"""Seconds from the end of a rank's function to the end of its process."""


class RankError(RuntimeError):
    """A rank failed: `rank`, with the exception `type_name`, `message` and `remote_traceback`."""

    def __init__(self, rank: int, report: Report, note: str = "") -> None:
        self.rank = rank
        self.type_name = report.error
        self.message = report.message
        self.remote_traceback = report.traceback
        what = "died" if report.error == "died" else f"raised {report.error}"
        parts = [f"rank {rank} {what}: {report.message}", report.traceback, note]
        super().__init__("\n\n".join(part for part in parts if part))


class RankTimeout(RuntimeError):
    """Some ranks did not finish in time: `ranks`. The message shows the stack of each."""

    def __init__(self, ranks: list[int], seconds: float, stacks: dict[int, str]) -> None:
        self.ranks = ranks
        self.stacks = stacks
        where = "\n".join(f"--- rank {rank} ---\n{stacks.get(rank, '(no stack)')}" for rank in ranks)
        super().__init__(f"ranks {ranks} did not finish within {seconds:g} s; their stacks:\n{where}")


@dataclass(frozen=True)
class RankOutcome:
    """How one rank of `spawn_ranks` ended.

    `error` is None if `fn` returned (then `value` is its result). Otherwise it is the name of the exception's type,
    "hung" for a rank that had to be killed (`message` shows its stack), or "died" for a process that ended without
    a report. `seconds` is the time from the start of `fn`.
    """

    exit_code: int | None
    error: str | None
    message: str
    seconds: float
    value: Any = None

    @property
    def hung(self) -> bool:
        """Whether the rank had to be killed."""
        return self.error == "hung"


class RankPool:
    """`world_size` processes, started by the first `run` and reused until `close`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: _Workers | None = None

    @property
    def alive(self) -> bool:
        """Whether the processes are running."""
        return self._workers is not None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 180.0, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results, in the order of the ranks.

        The default process group is all ranks. Every job starts with seed 0, float32 as default dtype and
        gradients enabled. Raises `RankError` with the traceback of the rank that failed first, or
        `RankTimeout`. After either the processes are killed, since the ranks may be out of step, and the next
        `run` starts new ones.
        """
        job = Job.of(fn, args, kwargs)
        if self._workers is None:
            self._workers = _Workers(self.world_size)
        finished = False
        try:
            self._workers.submit(job)
            reports = self._workers.collect(timeout, stop_at_failure=True)
            self._raise_failure(reports, timeout)
            results = [_load(reports[rank].value) for rank in range(self.world_size)]
            finished = True
            return results
        finally:
            if not finished:  # also on KeyboardInterrupt
                self.close()

    def close(self) -> None:
        """Kill the processes."""
        if self._workers is not None:
            self._workers.kill()
            self._workers = None

    def _raise_failure(self, reports: dict[int, Report], timeout: float) -> None:
        assert self._workers is not None
        failed = {rank: report for rank, report in sorted(reports.items()) if report.error is not None}
        missing = [rank for rank in range(self.world_size) if rank not in reports]
        if failed:
            # A rank that lost its peer fails too, but the peer has the cause.
            rank = min(failed, key=lambda rank: (failed[rank].is_consequence, rank))
            others = "; ".join(
                [f"rank {r} also raised {failed[r].error}" for r in failed if r != rank]
                + [f"rank {r} had not finished" for r in missing]
            )
            raise RankError(rank, failed[rank], others)
        if missing:
            raise RankTimeout(missing, timeout, self._workers.stacks(missing))


def spawn_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 1800.0,
    **kwargs: Any,
) -> list[RankOutcome]:
    """Call `fn(*args, **kwargs)` on `n` new ranks and return how each of them ended, whatever they do.

    A rank whose function raises exits at once with code 1, so that its peers see what they would see in a
    real job. Ranks that still run `timeout` seconds after the start of `fn` are killed. `group_timeout`
    is the timeout of the process group's collectives.
    """
    job = Job.of(fn, args, kwargs, last=True)
    workers = _Workers(n, group_timeout=group_timeout)
    try:
        workers.submit(job)
        reports = workers.collect(timeout, stop_at_failure=False)
        hung = [rank for rank in range(n) if rank not in reports]
        stacks = workers.stacks(hung)
        workers.join([rank for rank in range(n) if rank in reports], EXIT_GRACE)
        exit_codes = [workers.exit_code(rank) for rank in range(n)]
    finally:
        workers.kill()
    return [_outcome(reports.get(rank), exit_codes[rank], timeout, stacks.get(rank, "")) for rank in range(n)]


def _outcome(report: Report | None, exit_code: int | None, timeout: float, stack: str) -> RankOutcome:
    if report is None:
        return RankOutcome(exit_code, "hung", stack, timeout)
    if exit_code is None:
        ended = f"raised {report.error}: {report.message}" if report.error else "returned"
        return RankOutcome(None, "hung", f"never exited after its function {ended}", report.seconds)
    value = _load(report.value) if report.error is None else None
    return RankOutcome(exit_code, report.error, report.message, report.seconds, value)


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


class _Workers:
    """The processes of one world: starts them, sends them jobs, receives their reports, kills them."""

    def __init__(self, world_size: int, group_timeout: float = 1800.0) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        # The parent hosts the store: its port is bound before any rank starts, so no rank races for one.
        self._store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=START_TIMEOUT),
        )
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._job_started = time.monotonic()
        try:
            for rank in range(world_size):
                self._start(rank, world_size, group_timeout)
            ready = self.collect(START_TIMEOUT, stop_at_failure=True)
            for rank, report in ready.items():
                if report.error is not None:
                    raise RankError(rank, report, "this was while the ranks were starting")
            missing = [rank for rank in range(world_size) if rank not in ready]
            if missing:
                raise RankTimeout(missing, START_TIMEOUT, self.stacks(missing))
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, world_size: int, group_timeout: float) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        settings = {
            "rank": rank,
            "world_size": world_size,
            "port": self._store.port,
            "group_timeout": group_timeout,
            "stack_file": str(self._stack_file(rank)),
            "path": [str(TESTS_DIR), str(TESTS_DIR.parent), *sys.path],
        }
        process = context.Process(target=serve, args=(theirs, settings), name=f"rank{rank}", daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def submit(self, job: Job) -> None:
        """Send a job to every rank."""
        self._job_started = time.monotonic()
        for pipe in self._pipes:
            try:
                pipe.send(job)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the rank is dead; collect() will say so

    def collect(self, timeout: float, stop_at_failure: bool) -> dict[int, Report]:
        """The reports by rank that arrive within `timeout` seconds."""
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + timeout
        while len(reports) < len(self._pipes):
            pending = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in reports}
            readable = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not readable:
                break
            for pipe in readable:
                rank = pending[pipe]  # type: ignore[index]
                reports[rank] = self._receive(rank)
                if stop_at_failure and reports[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return reports

    def _receive(self, rank: int) -> Report:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.join([rank], EXIT_GRACE)
            message = f"the process ended with exit code {self.exit_code(rank)} and without a report"
            return Report(error="died", message=message, seconds=time.monotonic() - self._job_started)

    def stacks(self, ranks: list[int]) -> dict[int, str]:
        """The current stacks of all threads of these ranks, the main thread's last."""
        for rank in ranks:
            process = self._processes[rank]
            if process.is_alive() and process.pid is not None and self._stack_file(rank).exists():
                os.kill(process.pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)
        files = {rank: self._stack_file(rank) for rank in ranks}
        return {rank: file.read_text(errors="replace") for rank, file in files.items() if file.exists()}

    def _stack_file(self, rank: int) -> Path:
        return Path(self._scratch.name) / f"rank{rank}.stack"

    def join(self, ranks: list[int], timeout: float) -> None:
        """Wait for the processes of these ranks to end."""
        deadline = time.monotonic() + timeout
        for rank in ranks:
            self._processes[rank].join(max(0.0, deadline - time.monotonic()))

    def exit_code(self, rank: int) -> int | None:
        """The exit code, or None while the process runs."""
        return self._processes[rank].exitcode

    def kill(self) -> None:
        """Send SIGKILL to what still runs: a rank inside a collective reacts to nothing else."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._scratch.cleanup()
