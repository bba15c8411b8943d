"""Launching ranks on this machine, and the console that commands print to."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

from ._errors import Terminated, UsageError

if TYPE_CHECKING:
    from rich.console import Console

# One thread per rank: the ranks share the cores of the machine.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    # Python's resource tracker warns of the semaphores that terminated ranks leave behind, and removes them.
    "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"])),
}

MAX_RANKS_PER_CORE, MAX_RANKS_ANYWHERE = 8, 16
"""The limit of ranks per core, and the limit for a machine of few cores: a rank takes a few hundred MB to start."""

TERMINATING_SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGINT")

# They repeat a rank's traceback line by line, each with a prefix; `RankFailed` shows it once.
VERBOSE_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.launcher.api",
    "torch.multiprocessing.spawn",
)


class RankFailed(RuntimeError):
    """A rank raised, or its process died. The message has the rank and its traceback."""

    @property
    def summary(self) -> str:
        """The rank and its error without the traceback."""
        rank, *lines = str(self).splitlines()
        starts = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(:|$)", line)]
        return " ".join([rank, *lines[starts[-1] :]]) if starts else str(self)


def console() -> Console:
    """A console as wide as the terminal; wide enough for tables if the output goes to a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def check_ranks(world_size: int) -> None:
    """Raise before the work starts if this machine cannot run so many ranks."""
    cores = os.cpu_count() or 1
    if not is_launched() and world_size > max(MAX_RANKS_ANYWHERE, MAX_RANKS_PER_CORE * cores):
        raise UsageError(
            f"--tp {world_size} is too many processes for this machine with {cores} cores: use a smaller --tp, start "
            "the ranks on several machines with torchrun, or simulate them with `paraxis plan`"
        )


def launch(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run the module-level function `fn(*args)` in `world_size` processes and return their results by rank.

    torch's elastic launcher starts the processes, which connect over loopback. If one fails, the others are terminated
    and `RankFailed` is raised. A command that `torchrun` started is itself one of the ranks: it runs `fn` and returns
    only its own result.
    """
    if is_launched():
        launched = int(os.environ["WORLD_SIZE"])
        if launched != world_size:
            raise UsageError(f"--tp {world_size}, but the launcher started {launched} ranks: use --tp {launched}")
        return [fn(*args)]
    check_ranks(world_size)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options: dict[str, Any] = {}
    if "signals_to_handle" in LaunchConfig.__dataclass_fields__:
        options["signals_to_handle"] = "SIGTERM,SIGHUP,SIGQUIT"  # SIGINT is forwarded as SIGTERM
    interrupts: AbstractContextManager[list[int]] = _forward_interrupts() if options else nullcontext([])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="spawn",
        **options,
    )
    with (
        _environment(WORKER_ENVIRONMENT),
        _restore_handlers(),
        _defer_signals_during_start(),
        interrupts as interrupted,
    ):
        try:
            results = elastic_launch(config, _run)(fn, *args)
        except SignalException as received:
            _kill_ranks()
            raise (KeyboardInterrupt if interrupted else Terminated(received.sigval)) from received
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RankFailed(f"rank {rank} failed:\n{_describe(failure)}") from None
    return [results[rank] for rank in range(world_size)]


def _kill_ranks() -> None:
    """Kill ranks that the launcher does not know of: a signal may arrive while it starts them."""
    remaining = multiprocessing.active_children()
    for process in remaining:
        process.kill()
    for process in remaining:
        process.join(10)


def _run(fn: Callable[..., Any], *args: Any) -> Any:
    """Run `fn` in a rank. From here on SIGINT ends the process, as it must when the launcher dies."""
    if hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _exit_with_parent()
    return fn(*args)


def _exit_with_parent() -> None:
    """End this rank when the launcher dies. The signal that torch asks the kernel for is missed during startup."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def is_launched() -> bool:
    """Whether torch's launcher (torchrun) started this process as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "WORLD_SIZE" in os.environ


def is_rank0() -> bool:
    """Whether this process prints for all ranks."""
    return not is_launched() or os.environ.get("RANK") == "0"


def _describe(failure: Any) -> str:
    """The traceback that the launcher recorded, or the exit code if there is none."""
    message = failure.message
    if isinstance(message, str):
        if failure.exitcode == -getattr(signal, "SIGKILL", 9):
            return "its process was killed (SIGKILL), as the kernel does when the memory is full: use a smaller model"
        exited = f"its process exited with code {failure.exitcode} and no traceback"
        return message if failure.exitcode < 0 else exited
    return message.get("extraInfo", {}).get("py_callstack") or str(message.get("message", message))


@contextmanager
def _forward_interrupts() -> Iterator[list[int]]:
    """Handle Ctrl-C in this process only. A terminal sends it to every rank, and each would print its own traceback.

    SIGINT is blocked in this thread, and processes started from it inherit that. It still reaches this process through
    another thread, which does not block it, and is forwarded as SIGTERM, on which the launcher terminates the ranks.
    Yields the list of interrupts received.
    """
    received: list[int] = []
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield received
        return
    resource_tracker.ensure_running()  # starting it with the first process would unblock the signal
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()

    def forward(number: int, _: Any) -> None:
        received.append(number)
        if len(received) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:  # a second Ctrl-C: do not wait for the ranks to exit
            for process in multiprocessing.active_children():
                process.kill()

    handler = signal.signal(signal.SIGINT, forward)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield received
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        done.set()


@contextmanager
def _restore_handlers() -> Iterator[None]:
    """Restore the signal handlers, which the launcher replaces and leaves replaced."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in TERMINATING_SIGNALS if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers} if in_main_thread else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _defer_signals_during_start() -> Iterator[None]:
    """Deliver a signal that arrives while a process is being started only after the start.

    Before that nothing knows the process that could terminate it, and it would print an error about the half of its
    arguments that it did not receive.
    """
    start = SpawnProcess.start

    def deferring_start(process: SpawnProcess) -> None:
        if threading.current_thread() is not threading.main_thread():
            return start(process)
        received: list[int] = []
        numbers = [getattr(signal, name) for name in TERMINATING_SIGNALS if hasattr(signal, name)]
        handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
        for number in handlers:
            signal.signal(number, lambda number, _: received.append(number))
        try:
            start(process)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if received:
            os.kill(os.getpid(), received[0])

    SpawnProcess.start = deferring_start  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SpawnProcess.start = start  # type: ignore[method-assign]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside, and restore the old values."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
