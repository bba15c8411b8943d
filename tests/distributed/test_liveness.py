"""Whether processes of this machine run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paraxis.distributed.liveness import is_alive, machine_id


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_running_ended_and_zombie_processes() -> None:
    assert is_alive(os.getpid())
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is reaped
    assert not is_alive(process.pid)
    process.wait()
    assert not is_alive(process.pid)


def test_processes_of_one_machine_have_the_same_id() -> None:
    code = "from paraxis.distributed.liveness import machine_id; print(machine_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == machine_id()
