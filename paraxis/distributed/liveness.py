"""Whether another rank's process is still there, for ranks on one machine."""

from __future__ import annotations

import os


def machine() -> str:
    """What processes have in common that see one another; empty where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
