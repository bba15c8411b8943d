"""The ranks of a service on this machine: started together, and ended together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

GRACE = 5.0
"""Seconds that the other ranks have to tell their clients and end, after one has died."""


def serve_ranks(
    ranks: int, run: Callable[..., None], arguments: tuple[Any, ...], environment: Mapping[str, str]
) -> int:
    """Run ``run(*arguments)`` in so many processes; the exit code of the service.

    A signal goes to rank 0, which ends the service. When rank 0 has ended, or any rank with an error, the others have
    ``GRACE`` seconds to end.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), **environment}
    processes = []
    before = {name: os.environ.get(name) for name in (*shared, "RANK", "LOCAL_RANK")}
    try:
        for rank in range(ranks):
            os.environ.update(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            process = context.Process(target=_run, args=(run, arguments), name=f"rank {rank}")
            processes.append(process)
            process.start()
    except BaseException:  # Ctrl-C too: the ranks that were started would wait for the others
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(10)
        raise
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return _wait(processes)


def _wait(processes: list[Any]) -> int:
    """Wait for all ranks to end, and hand signals to rank 0."""

    def forward(number: int, _: Any) -> None:
        if processes[0].is_alive():
            os.kill(processes[0].pid, signal.SIGTERM)

    handlers = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    deadline = None
    try:
        while alive := [process for process in processes if process.is_alive()]:
            wait([process.sentinel for process in alive], timeout=0.5)
            codes = [process.exitcode for process in processes]
            if deadline is None and (codes[0] is not None or any(code not in (None, 0) for code in codes)):
                deadline = time.monotonic() + GRACE
            if deadline is not None and time.monotonic() > deadline:
                for process in alive:
                    process.kill()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)
    return max((1 if process.exitcode else 0) for process in processes)


def _run(run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """In a rank: it ends when the process that has started it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the parent hands it on
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    try:
        run(*arguments)
    except Exception as error:  # a command ends by raising its exit code
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        sys.exit(code)
