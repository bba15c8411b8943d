"""The progress line: shown on a terminal, and only there."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

PROGRAM = """
import time
from paraxis.utils.progress import stage
with stage("Capturing the model"):
    with stage("Searching"):
        time.sleep(3)  # refreshed every half second, if the machine is not busy
print("done")
"""


def shown(terminal: bool) -> str:
    """What the program writes to standard error, a terminal or a pipe."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    subprocess.run([sys.executable, "-c", PROGRAM], stderr=theirs, check=True, stdout=subprocess.DEVNULL, timeout=60)
    os.set_blocking(ours, False)
    try:
        return os.read(ours, 1 << 16).decode()
    except BlockingIOError:
        return ""
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_shows_the_stage_and_a_clock() -> None:
    text = shown(terminal=True)
    assert "Capturing the model 00:00" in text
    assert "Searching 00:01" in text  # the clock runs
    assert " " * 20 in text.rpartition("Capturing the model")[2]  # the line disappears at the end


def test_a_pipe_shows_nothing() -> None:
    assert shown(terminal=False) == ""
