"""``accelerate.Accelerator`` with a parallel model: a loop as accelerate's guides write it, against one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models.compare import parallel, reference
from safetensors.torch import load_file

from paraxis.integrations.accelerate import adapt_accelerator, tensor_parallel_group

accelerate = pytest.importorskip("accelerate")

ROWS = torch.randint(3, 256, (16, 12), generator=torch.Generator().manual_seed(4))


def as_torchrun_does() -> Any:
    """The environment of torchrun, for as long as the test of this rank takes."""
    rank = str(dist.get_rank())
    return mock.patch.dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")


def new_accelerator(**options: Any) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(**options)


def loop(model: Any, folder: str | None, resume: bool = False, **options: Any) -> dict[str, Any]:
    """Four batches, two to a step; the state is saved after two of them, or loaded before the other two."""
    accelerator = new_accelerator(gradient_accumulation_steps=2, **options)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ROWS], batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found: dict[str, Any] = {"losses": [], "rates": []}
    if resume:
        accelerator.load_state(folder)
    for index, rows in enumerate(loader):
        if resume and index < 2:
            continue
        with accelerator.accumulate(model):
            loss = model(**rows).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["rates"].append(scheduler.get_last_lr()[0])
        if index == 1 and folder is not None and not resume:
            accelerator.save_state(folder)
    with torch.no_grad():
        found["seen"] = len(accelerator.gather_for_metrics(model.eval()(input_ids=ROWS[:4]).logits))
    found["model"], found["accelerator"] = model, accelerator
    return found


def runs(folder: str, target: str) -> dict[str, Any]:
    with as_torchrun_does():
        return run_twice(folder, target)


def run_twice(folder: str, target: str) -> dict[str, Any]:
    model, _ = parallel(folder)
    found = loop(model, f"{target}/state", cpu=True)
    accelerator = found.pop("accelerator")
    accelerator.unwrap_model(found.pop("model")).save_pretrained(
        f"{target}/model", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.save_model(model, f"{target}/weights")
    again = loop(parallel(folder)[0], f"{target}/state", resume=True, cpu=True)
    return {**found, "resumed": again["losses"]}


def test_a_loop_is_that_of_one_process(ranks: Any, checkpoints: Any, tmp_path: Path) -> None:
    folder = checkpoints("llama", num_hidden_layers=1)
    results = ranks(2).run(runs, folder, str(tmp_path))
    expected = loop(reference(folder), None, cpu=True)
    saved = reference(str(tmp_path / "model"))
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    for found in results:
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4)
        assert found["resumed"] == pytest.approx(expected["losses"][2:], abs=1e-4)
        assert found["rates"] == pytest.approx(expected["rates"]), "the scheduler takes one step, not one per rank"
        assert found["seen"] == 4, "each rank has all samples"
    for name, parameter in saved.named_parameters():
        right = expected["model"].get_parameter(name)
        assert (parameter - right).abs().max() < 1e-3 and (weights[name] - parameter).abs().max() < 1e-6, name


def refused(folder: str) -> dict[str, str]:
    with as_torchrun_does():
        return errors_of_prepare(folder)


def errors_of_prepare(folder: str) -> dict[str, str]:
    model, _ = parallel(folder)
    loader = torch.utils.data.DataLoader([1, 2, 3, 4])
    errors = {}
    for name, options, first in (("ranks", {}, False), ("loader", {"cpu": True}, True)):
        accelerator = new_accelerator(**options)
        if first:
            accelerator.prepare(loader)
        try:
            accelerator.prepare(model)
            errors[name] = "no error"
        except ValueError as error:
            errors[name] = str(error)
    return errors


def test_what_cannot_work_is_refused_before_the_first_step(ranks: Any, checkpoints: Any) -> None:
    for errors in ranks(2).run(refused, checkpoints("llama", num_hidden_layers=1)):
        assert "Accelerator(cpu=True)" in errors["ranks"] and "sharded over 2 ranks" in errors["ranks"]
        assert "Prepare the model first" in errors["loader"]


def test_other_models_are_prepared_as_before() -> None:
    adapt_accelerator()
    adapt_accelerator()  # once is enough
    model = torch.nn.Linear(2, 2)
    assert tensor_parallel_group(model) is None and tensor_parallel_group(None) is None
    assert new_accelerator(cpu=True).prepare(model) is model
