"""The end of a process: threads of process groups let go of their tensors before Python is gone."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paraxis.compat.distributed import running_group_threads
from paraxis.distributed.exit import wait_for_group_threads

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are looked up in /proc")


def test_threads_that_have_work_are_waited_for() -> None:
    """A thread of that name that computes is waited for, one that sleeps is not."""
    ended, slept = threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).pthread_setname_np(ctypes.c_ulong(threading.get_ident()), b"pt_gloo_runloop")
        while not ended.is_set():
            sum(range(2000))
        slept.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while not running_group_threads():
        time.sleep(0.001)
    assert not wait_for_group_threads(limit=0.1)
    ended.set()
    assert wait_for_group_threads(limit=30.0)
    slept.set()
    thread.join()


ENDING = """
import sys, threading, time, weakref
import torch, torch.distributed as dist
import paraxis

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
ctx = paraxis.ParallelExecutionCtx(dist.group.WORLD, torch.device("cpu"))
dropping = threading.Event()

def drop(_):
    dropping.set()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        pass

time.sleep(rank)  # the other rank's collective waits, while only its thread has the tensor
x = torch.ones(4)
last = weakref.ref(x, drop if rank == 0 else None)
work = dist.all_reduce(x, async_op=True)
if rank == 0:
    del x, work
    dropping.wait()
else:
    work.wait()
"""
"""A program that ends while a thread of its process group, busy for a second, drops the tensor of a collective."""


def test_a_thread_that_drops_a_tensor_does_not_end_the_program(tmp_path: Path) -> None:
    """The exit code is that of the program; it was 134 ("terminate called without an active exception")."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", ENDING, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
