"""Ranks that end in several ways, for :func:`paraxis.serving.launch.serve_ranks`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def end(how: str, folder: str) -> None:
    """Rank 1 ends like this; the others wait for a signal, or to be killed."""
    rank = os.environ["RANK"]
    Path(folder, f"{how}-{rank}").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']}")
    if how == "all":
        return
    if rank == "1" and how == "error":
        raise RuntimeError("no memory")
    if rank == "1" and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == "0" and how == "signal":
        signal.signal(signal.SIGTERM, lambda *_: Path(folder, "stop").touch())
        os.kill(os.getppid(), signal.SIGTERM)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not Path(folder, "stop").exists():
        time.sleep(0.05)
