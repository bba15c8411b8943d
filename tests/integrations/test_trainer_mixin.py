"""Plain ``transformers.Trainer``, and TRL's ``SFTTrainer``, with a parallel model: a user's script, unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import batch, reference

from paraxis.integrations.trainer_mixin import ParallelTrainerMixin, adapt_trainer, shard_state

pytest.importorskip("accelerate")

SCRIPT = Path(__file__).with_name("trainer_script.py")


def run(ranks: int, folder: str, output: Path, *options: str) -> tuple[dict[str, float], str]:
    """(the script's log by step and kind, what it wrote to stderr)"""
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += [] if ranks == 1 else [f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    command = [*start, str(SCRIPT), "--model", folder, "--output", str(output), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOG ")]
    return json.loads(line.removeprefix("LOG ")), done.stderr


def assert_same(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value == pytest.approx(expected[key], abs=1e-4), key


def check(folder: str, tmp_path: Path, *options: str, gathers: bool = False) -> None:
    """Four steps against one process; from the checkpoint after two, the other two again."""
    expected, _ = run(1, folder, tmp_path / "single", *options)
    found, warnings = run(2, folder, tmp_path / "ranks", *options)
    assert_same(found, expected)
    # The same losses without tensor parallelism would prove nothing: no weight is gathered to be used.
    assert ("is gathered first" in warnings) is gathers, warnings[-2000:]
    for name in ("checkpoint-4", "final"):
        shutil.move(tmp_path / "ranks" / name, tmp_path / name)
    resumed, _ = run(2, folder, tmp_path / "ranks", *options)
    assert_same(resumed, expected)


def test_a_plain_trainer_trains_saves_and_resumes(checkpoints: Any, tmp_path: Path) -> None:
    check(checkpoints("llama", num_hidden_layers=1), tmp_path)
    ids, _ = batch(256)
    with torch.no_grad():
        logits = [
            reference(str(tmp_path / name))(input_ids=ids).logits
            for name in ("single/final", "final", "checkpoint-4", "ranks/final")
        ]
    for found in logits[1:]:
        assert (found - logits[0]).abs().max() < 1e-3


@pytest.mark.long
def test_adapters_of_peft(checkpoints: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = checkpoints("llama", num_hidden_layers=1)
    check(folder, tmp_path, "--lora", "--use-cpu")
    ids, _ = batch(256)
    with torch.no_grad():
        single, ours = (
            peft.PeftModel.from_pretrained(reference(folder), tmp_path / name).eval()(input_ids=ids).logits
            for name in ("single/final", "final")
        )
        assert (single - reference(folder)(input_ids=ids).logits).abs().max() > 1e-3, "the adapters do something"
    assert (ours - single).abs().max() < 1e-3


@pytest.mark.long
def test_trl_has_the_losses_of_one_process_but_gathers_the_head(checkpoints: Any, tmp_path: Path) -> None:
    """``SFTTrainer`` replaces the forward: correct, saved and resumed, but its head is gathered. See the guide."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    check(checkpoints("llama", num_hidden_layers=1), tmp_path, "--sft", gathers=True)
    ids, _ = batch(256)
    with torch.no_grad():
        single, ours = (reference(str(tmp_path / name))(input_ids=ids).logits for name in ("single/final", "final"))
    assert (ours - single).abs().max() < 1e-3


def test_a_trainer_of_another_model_is_unchanged(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    adapt_trainer()
    adapt_trainer()  # once is enough
    trainer = Trainer(torch.nn.Linear(2, 2), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    assert type(trainer) is Trainer and not isinstance(trainer, ParallelTrainerMixin)


def test_the_state_of_an_unsharded_optimizer_is_unchanged_by_sharding() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    optimizer.state[parameter]["momentum_buffer"] = buffer = torch.ones(2)
    shard_state(optimizer)
    assert optimizer.state[parameter]["momentum_buffer"] is buffer
