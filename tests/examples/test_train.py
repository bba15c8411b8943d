"""`examples/train.py`, run by torchrun: a killed run resumes, and wrong options are explained."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train.py"
SMALL = ["--width", "64", "--layers", "2", "--length", "32", "--steps", "12", "--save-every", "4"]


def start(ranks: int, *arguments: Any) -> subprocess.Popen[str]:
    """Start the example on this many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, str(SCRIPT), *SMALL, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PARAXIS_CACHE": ""},
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a run that must succeed; its output."""
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    return output


def losses(path: Path) -> list[float]:
    """The losses that a run has written."""
    with path.open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def workers(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks that torchrun has started."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(word) for word in listed.split()]


@pytest.mark.long
@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_killed_training_resumes_with_the_same_losses(tmp_path: Path, data_parallel: str) -> None:
    """On 2 × 2 ranks, killed and resumed there; then on one rank that accumulates gradients: the same losses."""
    mesh = ["--dp", 2, "--tp", 2, "--data-parallel", data_parallel]
    checkpoint = ["--checkpoint", tmp_path / "run"]
    output = finish(start(4, *mesh, "--losses", tmp_path / "right.csv", "--sample", 8, "--export", tmp_path / "model"))
    right = losses(tmp_path / "right.csv")
    assert len(right) == 12 and right[-1] < right[0] and "tokens/s" in output
    assert (tmp_path / "model" / "model.safetensors").is_file()

    stopped = start(4, *mesh, *checkpoint)
    assert stopped.stdout is not None
    for line in stopped.stdout:
        if "saved after step 4" in line:
            break
    began = time.monotonic()
    os.kill(workers(stopped)[-1], signal.SIGKILL)
    rest, _ = stopped.communicate(timeout=60)
    assert stopped.returncode != 0 and time.monotonic() - began < 40, rest

    output = finish(start(4, *mesh, *checkpoint, "--resume", "--losses", tmp_path / "again.csv"))
    assert "resumed after step" in output
    assert losses(tmp_path / "again.csv") == pytest.approx(right, abs=1e-6)
    finish(start(1, "--accumulate", 2, "--losses", tmp_path / "alone.csv"))
    assert losses(tmp_path / "alone.csv") == pytest.approx(right, abs=1e-4)


@pytest.mark.long
def test_wrong_options_are_explained() -> None:
    for ranks, arguments, word in (
        (2, ["--tp", 4], "tp=4 × dp=1 does not fit 2 ranks"),
        (1, ["--batch", 3, "--accumulate", 2], "divide"),
    ):
        process = start(ranks, *arguments)
        output, _ = process.communicate(timeout=60)
        assert process.returncode != 0 and word in output
