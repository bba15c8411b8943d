"""The process of one rank: joins the group, then runs jobs and reports on each. See ranks.py."""

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

CONSEQUENCES = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting", "gloo")
"""Messages of a rank whose peer ended or did not join."""


@dataclass(frozen=True)
class Job:
    """A call to make. The arguments are bytes, loaded after the function's module is imported."""

    module: str
    file: str | None
    function: str
    arguments: bytes
    last: bool = False

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], last: bool = False) -> Job:
        """The job of calling ``fn(*args, **kwargs)``."""
        if "<" in fn.__qualname__:
            raise TypeError(f"{fn.__qualname__} cannot run on ranks: it is not at the top of its module")
        file = getattr(sys.modules[fn.__module__], "__file__", None)
        return Job(fn.__module__, file, fn.__qualname__, dump((args, kwargs)), last)

    def call(self) -> Any:
        """Make the call, in the process of a rank."""
        import torch

        fn: Any = _module(self.module, self.file)
        for name in self.function.split("."):
            fn = getattr(fn, name)
        args, kwargs = torch.load(io.BytesIO(self.arguments), weights_only=False)
        return fn(*args, **kwargs)


@dataclass(frozen=True)
class Report:
    """The result of a job on one rank: `error` is None, or the name of the exception's type."""

    error: str | None = None
    message: str = ""
    traceback: str = ""
    is_consequence: bool = False
    value: bytes = b""
    seconds: float = 0.0


def dump(value: Any) -> bytes:
    """Serialize with torch.save: pickle would send tensors as shared memory, which is freed with the sender."""
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
        except EOFError:  # the parent closed the pipe
            _leave(0)
        report = _report(job.call)
        pipe.send(report)
        if job.last:
            _leave(0 if report.error is None else 1)
        _clean_up()
    _leave(1)


def _leave(exit_code: int) -> NoReturn:
    """End the process as Python would, without the destructors of the last objects.

    Where a process group is still alive, those may abort the process, and then the exit code means nothing.
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
    # On this signal every thread writes its stack to the file, so that a timeout can show where a rank hangs.
    faulthandler.register(signal.SIGUSR1, file=open(settings["stack_file"], "w"), all_threads=True)  # noqa: SIM115
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this rank with the test session, even if it hangs in a collective."""
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
    """Run `call` and report its result. A result that cannot be serialized is a failure too."""
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
    """Import the module by its name if that is the same file, otherwise from the file.

    The name that pytest chooses for a test module depends on its import mode and may not be importable.
    """
    try:
        module = importlib.import_module(name)
        if file is None or getattr(module, "__file__", None) == file:
            return module
    except ModuleNotFoundError as error:
        # A missing module other than this one and its parents is an error of the test.
        if file is None or error.name is None or not (name + ".").startswith(error.name + "."):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} cannot be loaded as a module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _clean_up() -> None:
    """Reset the process for the next job."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    _reset_defaults()
    gc.collect()
    gc.freeze()  # mostly modules, which every later collection would traverse again


def _reset_defaults() -> None:
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
