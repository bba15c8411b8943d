"""`transformers.Trainer` with a parallel model: the example on several ranks, against one process."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.py"


def run(ranks: int, output: Path, *options: str) -> dict[tuple[int, str], float]:
    """Run the example on ``ranks`` ranks; its log, by step and kind."""
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += [] if ranks == 1 else [f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    command = [*start, str(EXAMPLE), "--output", str(output), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{'step'")]
    return {(line["step"], key): value for line in lines for key, value in line.items() if key != "step"}


def assert_same_log(found: dict[tuple[int, str], float], expected: dict[tuple[int, str], float]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value == pytest.approx(expected[key], abs=1e-4, rel=1e-4), key


def test_two_steps_are_those_of_one_process(tmp_path: Path) -> None:
    found = run(2, tmp_path / "ranks", "--steps", "2")
    assert {kind for _, kind in found} >= {"loss", "grad_norm"}
    assert_same_log(found, run(1, tmp_path / "single", "--steps", "2"))


@pytest.mark.long
def test_checkpoints_resume_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Six steps, then three more from the last checkpoint, on ranks and on one process."""
    expected = run(1, tmp_path / "single")
    found = run(2, tmp_path / "ranks")
    assert {kind for _, kind in found} == {"loss", "grad_norm", "eval_loss"}
    assert found[6, "loss"] < found[1, "loss"]
    assert_same_log(found, expected)
    assert not list((tmp_path / "ranks").rglob("optimizer.pt")), "the optimizer is saved by all ranks, in shards"

    shutil.copytree(tmp_path / "single", tmp_path / "moved")
    longer = run(1, tmp_path / "single", "--steps", "9")
    assert_same_log(run(2, tmp_path / "ranks", "--steps", "9"), longer)
    assert_same_log(run(2, tmp_path / "moved", "--steps", "9"), longer)

    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "final") for name in ("single", "ranks", "moved")]
    ids = torch.arange(97, 123)[None]
    with torch.no_grad():
        single, *others = (model(input_ids=ids).logits for model in models)
    for logits in others:
        assert (logits - single).abs().max() < 1e-3
