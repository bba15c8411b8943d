"""Ranks and signals: a command that is terminated leaves no process and no file behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paraxis.cli._errors import UsageError
from paraxis.cli._launch import RankFailed, launch
from paraxis.plan import CollectivePlan, Plan

PARAXIS = [sys.executable, "-c", "from paraxis.cli import main; main()"]


def descendants(pid: int) -> list[int]:
    """The processes that a process started, directly or not."""
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    except OSError:
        pass
    return found


def is_rank(pid: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def terminated(
    args: list[str], number: signal.Signals, to_group: bool, temporary: Path, ranks: int = 2
) -> tuple[int, str]:
    """Start a command, send a signal once its ranks run, and check that nothing remains: (exit code, stderr)."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    started = subprocess.Popen(
        [*PARAXIS, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=environment,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and started.poll() is None:
        if len([pid for pid in descendants(started.pid) if is_rank(pid)]) >= ranks and any(temporary.iterdir()):
            break
        time.sleep(0.05)
    processes = descendants(started.pid)
    assert len(processes) >= ranks
    (os.killpg if to_group else os.kill)(started.pid, number)
    _, text = started.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, processes)), "ranks are left behind"
    assert not [path for path in temporary.iterdir() if path.name.startswith("paraxis-")], "files are left behind"
    return started.returncode, text


def message(number: signal.Signals) -> str:
    return "paraxis: interrupted" if number == signal.SIGINT else f"paraxis: terminated by {number.name}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_with_ranks_is_terminated(number: signal.Signals, folder: str, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal, other signals only the command."""
    code, text = terminated(["verify", folder, "--tp", "2"], number, number == signal.SIGINT, tmp_path)
    assert code == 128 + number and text.strip() == message(number)


def test_a_command_that_is_killed_leaves_nothing_behind(folder: str, tmp_path: Path) -> None:
    """SIGKILL, as from a kernel that is out of memory: the command cannot clean up by itself."""
    code, text = terminated(["verify", folder, "--tp", "2"], signal.SIGKILL, False, tmp_path)
    assert code == -signal.SIGKILL and not text.strip()


def test_a_killed_rank_ends_the_command(folder: str, tmp_path: Path) -> None:
    """The message says why a process may have been killed."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*PARAXIS, "verify", folder, "--tp", "2"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    ranks: list[int] = []
    deadline = time.monotonic() + 60
    while len(ranks) < 2 and time.monotonic() < deadline and started.poll() is None:
        time.sleep(0.05)
        ranks = [pid for pid in descendants(started.pid) if is_rank(pid)]
    os.kill(ranks[0], signal.SIGKILL)
    _, text = started.communicate(timeout=60)
    assert started.returncode == 1 and "its process was killed (SIGKILL)" in text and "Traceback" not in text
    assert not any(map(is_alive, ranks))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("paraxis-")]


@pytest.mark.long
@pytest.mark.parametrize("name", ["demo", "bench", "calibrate", "doctor"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_commands_with_ranks_are_terminated(
    name: str, number: signal.Signals, folder: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = str(tmp_path_factory.mktemp("out") / "machine.json")
    args = {"bench": [folder], "calibrate": ["--out", out]}.get(name, [])
    code, text = terminated([name, *args], number, number == signal.SIGINT, tmp_path)
    assert code == 128 + number and "Traceback" not in text
    assert text.strip().splitlines()[-1] == message(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_without_ranks_is_terminated(number: signal.Signals) -> None:
    """In a process that needs no torch: the command waits for its prompt."""
    read = f"lambda: os.kill(os.getpid(), {int(number)})"
    code = f"import os, sys, types; sys.stdin = types.SimpleNamespace(read={read})"
    args = ["generate", "no/model"]
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; from paraxis.cli import main; main()", *args],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a background job may ignore it
    )
    assert found.returncode == 128 + number
    assert found.stderr == f"{message(number)}\n"


def test_a_closed_pipe(tmp_path: Path) -> None:
    """As with `| head -1`: no message, and the exit code of other programs."""
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        Plan(2, seconds=seconds, collectives=[CollectivePlan("all_reduce", name, (2,), "float32")]).save(
            str(tmp_path / name)
        )
    reading, writing = os.pipe()
    os.close(reading)
    found = subprocess.run(
        [*PARAXIS, "diff", str(tmp_path / "a"), str(tmp_path / "b")], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert found.returncode == 128 + signal.SIGPIPE and not found.stderr


def test_a_command_under_torchrun_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launch(4, os.getpid) == [os.getpid()]
    with pytest.raises(UsageError, match="--tp 2, but the launcher started 4 ranks: use --tp 4"):
        launch(2, os.getpid)


def test_a_failed_rank_has_a_summary() -> None:
    error = RankFailed("rank 1 failed:\nTraceback (most recent call last):\n  File ...\nValueError: no\n  more")
    assert error.summary == "rank 1 failed: ValueError: no   more"
    assert RankFailed("rank 0 failed:").summary == "rank 0 failed:"
