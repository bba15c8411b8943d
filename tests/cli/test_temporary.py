"""The temporary folder: gone however its process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paraxis.cli._temporary import temporary_folder

HOLD = """
import sys, time
from paraxis.cli._temporary import temporary_folder
with temporary_folder("paraxis-test-") as folder:
    open(folder + "/weights", "w").close()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_the_folder_exists_inside_and_not_after() -> None:
    with temporary_folder("paraxis-test-") as folder:
        Path(folder, "file").write_text("x")
        assert Path(folder).name.startswith("paraxis-test-")
    assert not Path(folder).exists()


def test_the_folder_is_removed_after_an_error() -> None:
    with pytest.raises(ValueError), temporary_folder("paraxis-test-") as folder:
        raise ValueError
    assert not Path(folder).exists()


def test_the_folder_of_a_killed_process_is_removed() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert (folder / "weights").exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists()
