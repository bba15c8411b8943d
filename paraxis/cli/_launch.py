"""What the commands share: launching ranks on this machine, and the console they print to."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

# One thread per rank: the ranks share the machine's cores.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
}

# They repeat a rank's traceback line by line, each with a prefix; `RankFailed` says it once.
CHATTY_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.launcher.api",
    "torch.multiprocessing.spawn",
)


class RankFailed(RuntimeError):
    """A rank raised, or its process died. The message names the rank and holds its traceback."""


def console() -> Console:
    """A console as wide as the terminal, or wide enough for tables where the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else 120)


def launch(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs the module-level function `fn(*args)` in `world_size` processes and returns their results by rank.

    The processes are started by torch's elastic launcher, with the environment that `init_process_group`
    reads, and meet over loopback. When one fails, the others are ended and `RankFailed` is raised.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="spawn",
    )
    with _environment(WORKER_ENVIRONMENT):
        try:
            results = elastic_launch(config, fn)(*args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RankFailed(f"rank {rank} failed:\n{_describe(failure)}") from None
    return [results[rank] for rank in range(world_size)]


def _describe(failure: Any) -> str:
    """The traceback that the launcher recorded, or how the process ended where there is none."""
    message = failure.message
    if isinstance(message, str):
        died = f"its process ended with exit code {failure.exitcode} and no traceback"
        return message if failure.exitcode < 0 else died
    return message.get("extraInfo", {}).get("py_callstack") or str(message.get("message", message))


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables, for the processes started meanwhile, and puts the old values back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
