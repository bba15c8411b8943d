"""The inside of one rank's process: joins the group, then runs jobs and reports on each. See ranks.py."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NoReturn

# What a rank says when its peer is gone, or has not come.
CONSEQUENCES = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting", "gloo")


@dataclass(frozen=True)
class Job:
    """A call to make. The arguments are bytes, to be read only once the function's module is there."""

    module: str
    file: str | None
    function: str
    arguments: bytes
    last: bool = False

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], last: bool = False) -> Job:
        if "<" in fn.__qualname__:
            raise TypeError(f"{fn.__qualname__} cannot run on ranks: it is not at the top of its module")
        file = getattr(sys.modules[fn.__module__], "__file__", None)
        return Job(fn.__module__, file, fn.__qualname__, dump((args, kwargs)), last)

    def call(self) -> Any:
        import torch

        fn: Any = _module(self.module, self.file)
        for name in self.function.split("."):
            fn = getattr(fn, name)
        args, kwargs = torch.load(io.BytesIO(self.arguments), weights_only=False)
        return fn(*args, **kwargs)


@dataclass(frozen=True)
class Report:
    """What came of a job on one rank: `error` is None, or the name of the exception's type."""

    error: str | None = None
    message: str = ""
    traceback: str = ""
    is_consequence: bool = False
    value: bytes = b""
    seconds: float = 0.0


def dump(value: Any) -> bytes:
    """Bytes by torch.save: plain pickle would send tensors as shared memory, which dies with the sender."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """The main function of a rank's process."""
    _prepare_process(settings)
    joined = _report(lambda: _join_group(settings))
    pipe.send(joined)
    while joined.error is None:
        try:
            job: Job = pipe.recv()
        except EOFError:  # the parent has let go
            _leave(0)
        report = _report(job.call)
        pipe.send(report)
        if job.last:
            _leave(0 if report.error is None else 1)
        _clean_up()
    _leave(1)


def _leave(exit_code: int) -> NoReturn:
    """Ends the process as Python would, but for the destructors of the last objects.

    Where a process group is still alive, those may abort the process, and then the exit code says nothing.
    """
    import torch.distributed as dist

    if exit_code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _prepare_process(settings: dict[str, Any]) -> None:
    sys.path[:] = list(dict.fromkeys(settings["path"]))
    rank, world_size = str(settings["rank"]), str(settings["world_size"])
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size,
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(settings["port"]),
        OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # On this signal, every thread's stack goes to the file: that is how a timeout can say where a rank hangs.
    faulthandler.register(signal.SIGUSR1, file=open(settings["stack_file"], "w"), all_threads=True)  # noqa: SIM115
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """No rank outlives the test session, not even one that hangs in a collective."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _join_group(settings: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _reset_defaults()
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", settings["port"], is_master=False),
        rank=settings["rank"],
        world_size=settings["world_size"],
        timeout=timedelta(seconds=settings["group_timeout"]),
    )


def _report(call: Callable[[], Any]) -> Report:
    """Runs `call` and reports what came of it. A result that cannot be sent is a failure as well."""
    start = time.monotonic()
    try:
        value = dump(call())
        return Report(value=value, seconds=time.monotonic() - start)
    except BaseException as error:
        return Report(
            error=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc(),
            is_consequence=_is_consequence(error),
            seconds=time.monotonic() - start,
        )


def _is_consequence(error: BaseException) -> bool:
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in CONSEQUENCES)


def _module(name: str, file: str | None) -> ModuleType:
    """The module, by name if that leads to the same file, otherwise from the file.

    How pytest names a test module depends on its import mode, and need not be a name that can be imported.
    """
    try:
        module = importlib.import_module(name)
        if file is None or getattr(module, "__file__", None) == file:
            return module
    except ModuleNotFoundError as error:
        # A missing module that is not this one nor a parent of it is the test's own affair.
        if file is None or error.name is None or not (name + ".").startswith(error.name + "."):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} cannot be loaded as a module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _clean_up() -> None:
    """Leaves the process as the next job wants to find it."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    _reset_defaults()
    gc.collect()
    gc.freeze()  # what is left stays: modules, mostly, which every later collection would go through again


def _reset_defaults() -> None:
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
