"""What a rank looks at while it waits: whether the others still run, and whether they do something else.

Whether a process runs is known for ranks on one machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_watches: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def watch_while_waiting(owner: Any, look: Callable[[Any], None]) -> None:
    """Call ``look(owner)`` now and then while this rank waits for others, as long as ``owner`` lives.

    It raises if it sees that waiting is in vain.
    """
    _watches[owner] = look


def look_around() -> None:
    """Called by everything that waits, a few times per second."""
    for owner, look in list(_watches.items()):
        look(owner)


def machine_id() -> str:
    """The same text for all processes that can see one another's process ids; empty where it is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs: it exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
