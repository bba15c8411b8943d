"""Whether another rank's process is still running, for ranks on one machine."""

from __future__ import annotations

import os


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
