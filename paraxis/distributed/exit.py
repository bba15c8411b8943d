"""The end of a process that has process groups: no thread of theirs may outlive Python.

A thread of gloo drops the tensors of a collective after it has woken up those who wait for the result, and takes the
GIL for that. If Python is gone by then, the thread is ended, C++ aborts the process ("terminate called without an
active exception"), and a program that succeeded has the exit code 134: on a busy machine, every now and then.
"""

from __future__ import annotations

import atexit
import functools
import time

import torch.distributed as dist

from ..compat.distributed import abort_process_groups, running_group_threads

IDLE_CHECKS = 3
"""How often in a row all threads must be asleep: one that has slept for the GIL runs in the next check."""
INTERVAL = 0.002
"""Seconds between two checks, in which other threads may take the GIL."""
LIMIT = 10.0
"""Seconds after which the process ends whatever its threads do."""


def end_process_groups(abort: bool = False) -> None:
    """Destroy all process groups, and wait until their threads are idle.

    Args:
        abort: Do not wait for collectives that are under way: other ranks may never join them.
    """
    if not dist.is_initialized():
        return
    if abort:
        abort_process_groups()
    else:
        dist.destroy_process_group()
    wait_for_group_threads()


def wait_for_group_threads(limit: float = LIMIT) -> bool:
    """Wait until no thread of a process group has work left that it could do; whether that is so within the limit.

    Threads that sleep in a collective of other ranks do not count.
    """
    end, idle = time.monotonic() + limit, 0
    while idle < IDLE_CHECKS:
        if time.monotonic() >= end:
            return False
        time.sleep(INTERVAL)
        idle = 0 if running_group_threads() else idle + 1
    return True


@functools.cache
def wait_at_exit() -> None:
    """Let Python wait for the threads of process groups when it ends, whoever has made the groups."""
    atexit.register(wait_for_group_threads)
