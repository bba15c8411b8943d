"""A temporary folder that is removed however the command ends, also when the kernel kills it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

REMOVE_AT_EOF = "import shutil, sys; sys.stdin.buffer.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
"""What the watching process runs: its standard input ends when the command does."""


@contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """A new folder, removed at the end.

    A process that is killed (SIGKILL, or out of memory) cannot clean up. So a second process waits for the end of a
    pipe that only this process holds, and removes what is left. It has a session of its own, so that Ctrl-C, which
    reaches every process of a terminal, does not end it first.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", REMOVE_AT_EOF, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield folder
        finally:
            assert watcher.stdin is not None
            watcher.stdin.close()
            watcher.wait()
