"""Private and version-dependent APIs of accelerate. Seen on accelerate 1.15.

accelerate is optional, so it is imported inside of functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

__all__ = [
    "accelerator_class",
    "has_data_loaders",
    "plain_optimizer",
    "prepared",
    "set_scheduler_steps",
    "set_tensor_parallel",
    "without_prepared",
]


def accelerator_class() -> Any:
    """``accelerate.Accelerator``, or None if accelerate is not installed."""
    if find_spec("accelerate") is None:
        return None
    from accelerate import Accelerator

    return Accelerator


def set_tensor_parallel(accelerator: Any, size: int) -> None:
    """Tell an accelerator that its ranks are tensor-parallel: data loaders then give all of them the same rows.

    Set after construction: the constructor refuses tensor parallelism on CPUs.
    """
    from accelerate import ParallelismConfig

    state = accelerator.state
    if state.parallelism_config is None or state.parallelism_config.tp_size != size:
        state.parallelism_config = ParallelismConfig(tp_size=size)
    state.device_mesh = state.parallelism_config.get_device_mesh(accelerator.device.type)


def has_data_loaders(accelerator: Any) -> bool:
    """Whether an accelerator has prepared data loaders already."""
    return bool(accelerator._dataloaders)


def prepared(accelerator: Any) -> tuple[list[nn.Module], list[Any]]:
    """The models and optimizers that an accelerator has prepared."""
    models: list[nn.Module] = list(accelerator._models)
    return models, list(accelerator._optimizers)


@contextmanager
def without_prepared(accelerator: Any) -> Iterator[None]:
    """The accelerator without its models and optimizers, to save or load everything else."""
    models, optimizers = accelerator._models, accelerator._optimizers
    accelerator._models, accelerator._optimizers = [], []
    try:
        yield
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers


def set_scheduler_steps(prepare_scheduler: Callable[..., Any]) -> Callable[..., Any]:
    """``prepare_scheduler`` for ranks that share a batch: one step of the scheduler in a step of the optimizer.

    accelerate otherwise takes as many as there are ranks, each of which has a batch of its own.
    """

    def prepare(scheduler: Any) -> Any:
        wrapped = prepare_scheduler(scheduler)
        wrapped.split_batches = True
        return wrapped

    return prepare


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the accelerator's wrapper."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
