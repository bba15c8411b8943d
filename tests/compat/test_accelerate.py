"""The private APIs of accelerate that Paraxis uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paraxis.compat.accelerate import (
    accelerator_class,
    has_data_loaders,
    plain_optimizer,
    prepared,
    set_scheduler_steps,
    without_prepared,
)

accelerate = pytest.importorskip("accelerate")


def fresh() -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True)


def test_what_an_accelerator_has_prepared() -> None:
    assert accelerator_class() is accelerate.Accelerator
    accelerator, model = fresh(), torch.nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    assert not has_data_loaders(accelerator)
    model, optimizer, _ = accelerator.prepare(model, plain, torch.utils.data.DataLoader([1, 2]))
    assert has_data_loaders(accelerator)
    assert prepared(accelerator) == ([model], [optimizer])
    with without_prepared(accelerator):
        assert prepared(accelerator) == ([], [])
    assert prepared(accelerator) == ([model], [optimizer])
    assert plain_optimizer(optimizer) is plain is plain_optimizer(plain)


def test_a_scheduler_takes_one_step() -> None:
    wrapped = set_scheduler_steps(lambda scheduler: SimpleNamespace(scheduler=scheduler, split_batches=False))("s")
    assert wrapped.split_batches and wrapped.scheduler == "s"
