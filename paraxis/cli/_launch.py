"""What the commands share: launching ranks on this machine, and the console they print to."""

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

from ._errors import Ended, UsageError

if TYPE_CHECKING:
    from rich.console import Console

# One thread per rank: the ranks share the machine's cores.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    # Ranks that are ended leave semaphores to the process that looks after such things, which says so.
    "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"])),
}

RANKS_PER_CORE, LEAST_MOST = 8, 16
"""How many ranks are started here at most, per core and in any case: each takes a few hundred MB before it begins."""

ENDING = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGINT")
"""The signals that ask a process to end."""

# They repeat a rank's traceback line by line, each with a prefix; `RankFailed` says it once.
CHATTY_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.launcher.api",
    "torch.multiprocessing.spawn",
)


class RankFailed(RuntimeError):
    """A rank raised, or its process died. The message names the rank and holds its traceback."""

    @property
    def in_short(self) -> str:
        """Who failed and of what, without the way there."""
        who, *lines = str(self).splitlines()
        starts = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(:|$)", line)]
        return " ".join([who, *lines[starts[-1] :]]) if starts else str(self)


def console() -> Console:
    """A console as wide as the terminal, or wide enough for tables where the output goes to a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def check_ranks(world_size: int) -> None:
    """Say that there are to be more ranks than this machine can bear before anything is done."""
    cores = os.cpu_count() or 1
    if not launched() and world_size > max(LEAST_MOST, RANKS_PER_CORE * cores):
        raise UsageError(
            f"--tp {world_size}: that many processes are too many for this machine of {cores} cores. Give a smaller "
            "--tp, start the ranks on several machines with torchrun, or see what they would do with `paraxis plan`."
        )


def launch(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs the module-level function `fn(*args)` in `world_size` processes and returns their results by rank.

    The processes are started by torch's elastic launcher, with the environment that `init_process_group`
    reads, and meet over loopback. When one fails, the others are ended and `RankFailed` is raised. A command that was
    itself started by the launcher (`torchrun`) is one of the ranks: it runs `fn` and has its own result alone.
    """
    if launched():
        found = int(os.environ["WORLD_SIZE"])
        if found != world_size:
            raise UsageError(f"--tp {world_size}, but the launcher has started {found} ranks: make them the same")
        return [fn(*args)]
    check_ranks(world_size)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    chosen: dict[str, Any] = {}
    if "signals_to_handle" in LaunchConfig.__dataclass_fields__:
        chosen["signals_to_handle"] = "SIGTERM,SIGHUP,SIGQUIT"  # an interrupt becomes the first of them
    quietly: AbstractContextManager[list[int]] = _interrupts_for_this_process_alone() if chosen else nullcontext([])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="spawn",
        **chosen,
    )
    with _environment(WORKER_ENVIRONMENT), _same_handlers(), _started_whole(), quietly as interrupted:
        try:
            results = elastic_launch(config, _run)(fn, *args)
        except SignalException as ending:
            _end_ranks()
            raise (KeyboardInterrupt if interrupted else Ended(ending.sigval)) from ending
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RankFailed(f"rank {rank} failed:\n{_describe(failure)}") from None
    return [results[rank] for rank in range(world_size)]


def _end_ranks() -> None:
    """End ranks that the launcher does not know yet: a signal may come while it starts them."""
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
    for process in left:
        process.join(10)


def _run(fn: Callable[..., Any], *args: Any) -> Any:
    """What a rank runs: `fn`, with interrupts ending it from here on, as they do when its launcher dies."""
    if hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return fn(*args)


def join() -> Any:
    """Meet the other ranks, each with a GPU of its own if there are enough; the device of this rank."""
    import torch
    import torch.distributed as dist

    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and torch.cuda.device_count() >= here:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def launched() -> bool:
    """Whether this process is one of several that torch's launcher has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this process is the one that speaks for all ranks."""
    return not launched() or os.environ.get("RANK") == "0"


def _describe(failure: Any) -> str:
    """The traceback that the launcher recorded, or how the process ended where there is none."""
    message = failure.message
    if isinstance(message, str):
        died = f"its process ended with exit code {failure.exitcode} and no traceback"
        return message if failure.exitcode < 0 else died
    return message.get("extraInfo", {}).get("py_callstack") or str(message.get("message", message))


@contextmanager
def _interrupts_for_this_process_alone() -> Iterator[list[int]]:
    """Ctrl-C goes to all processes of a terminal, and every rank would show where it was; this one ends them anyway.

    Processes that are started meanwhile begin with the signal blocked, as this thread has it. It still reaches this
    process, by way of a thread that does not block it, and becomes the signal on which the launcher ends the ranks; it
    is noted in the list that is given.
    """
    seen: list[int] = []
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield seen
        return
    resource_tracker.ensure_running()  # starting it with the first process would unblock the signal
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()

    def pass_on(number: int, _: Any) -> None:
        seen.append(number)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:  # again: somebody does not want to wait for the ranks to end by themselves
            for process in multiprocessing.active_children():
                process.kill()

    handler = signal.signal(signal.SIGINT, pass_on)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield seen
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        done.set()


@contextmanager
def _same_handlers() -> Iterator[None]:
    """The launcher leaves its handlers of signals behind; put those back that were there before."""
    here = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers} if here else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _started_whole() -> Iterator[None]:
    """Take a signal that comes while a process is being started once it is.

    Before that it is known to nobody who could end it, and it would complain that it was told but half of what to do.
    """
    start = SpawnProcess.start

    def whole(process: SpawnProcess) -> None:
        if threading.current_thread() is not threading.main_thread():
            return start(process)
        came: list[int] = []
        numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
        handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
        for number in handlers:
            signal.signal(number, lambda number, _: came.append(number))
        try:
            start(process)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if came:
            os.kill(os.getpid(), came[0])

    SpawnProcess.start = whole  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SpawnProcess.start = start  # type: ignore[method-assign]


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
