"""``accelerate.Accelerator`` with a parallel model.

An accelerator on several ranks assumes that they are data-parallel: each of them gets other rows, the model is wrapped
in DDP, rank 0 saves alone, and the scheduler takes as many steps as there are ranks. For tensor-parallel ranks all of
that is wrong. accelerate knows tensor parallelism, but only of models that transformers has sharded, not on CPUs, and
without saving an optimizer. So when an accelerator prepares a parallel model, it is told that its ranks are
tensor-parallel, and the methods of this one accelerator that must be collectives are replaced.

:func:`adapt_accelerator` makes every accelerator look for parallel models. Others are prepared as before.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..compat.accelerate import (
    accelerator_class,
    has_data_loaders,
    plain_optimizer,
    prepared,
    set_scheduler_steps,
    set_tensor_parallel,
    without_prepared,
)
from ..tensor.sharded_tensor import ShardedTensor, full_tensor_of
from ..weights.state import load_state, save_state

STATE = "parallel_state"
"""The folder in a checkpoint with the sharded state of the model and the optimizer."""
_ADAPTED = "_paraxis_adapted"
"""Marks a method that looks for parallel models, and an accelerator whose ranks are tensor-parallel."""


def tensor_parallel_group(model: nn.Module | None) -> dist.ProcessGroup | None:
    """The ranks that a model is sharded over; None if it is not parallel, or on one rank."""
    if model is None:
        return None
    first = next((p for p in model.parameters() if isinstance(p, ShardedTensor)), None)
    found = first.group if first is not None else None
    return found if found is not None and dist.get_world_size(found) > 1 else None


def adapt_accelerator() -> None:
    """Let every ``Accelerator`` look for parallel models in ``prepare`` and ``prepare_model``. Done once."""
    cls = accelerator_class()
    if cls is None or hasattr(cls.prepare, _ADAPTED):
        return
    for name in ("prepare", "prepare_model"):
        setattr(cls, name, _looking_for_models(getattr(cls, name)))


def _looking_for_models(method: Any) -> Any:
    """``Accelerator.prepare`` or ``prepare_model``: with a parallel model, the accelerator becomes tensor-parallel."""

    @functools.wraps(method)
    def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
        for model in (x for x in (*objects, options.get("model")) if isinstance(x, nn.Module)):
            group = tensor_parallel_group(model)
            if group is not None:
                make_tensor_parallel(accelerator, group)
                if method.__name__ == "prepare_model":  # mixed precision as for evaluation: no wrapper, no device
                    options = {**options, "device_placement": False, "evaluation_mode": True}
                    objects = objects[:1]
        return method(accelerator, *objects, **options)

    setattr(prepare, _ADAPTED, True)
    return prepare


def make_tensor_parallel(accelerator: Any, group: dist.ProcessGroup) -> None:
    """Make the ranks of an accelerator tensor-parallel ranks of one model.

    Raises:
        ValueError: The accelerator has other ranks than the model, or has prepared a data loader before it.
    """
    if hasattr(accelerator, _ADAPTED):
        return
    size = dist.get_world_size(group)
    if size != accelerator.num_processes:
        raise ValueError(
            f"the model is sharded over {size} ranks, but the accelerator runs on {accelerator.num_processes}: these "
            "must be the same. On CPUs pass Accelerator(cpu=True) or TrainingArguments(use_cpu=True); to combine "
            "tensor parallelism with data parallelism, write your own training loop (docs/guides/data-parallel.md)."
        )
    if has_data_loaders(accelerator):
        raise ValueError(
            "the accelerator has prepared a data loader before the parallel model, with other rows for each rank; "
            "tensor-parallel ranks need the same rows. Prepare the model first, or all in one call: "
            "accelerator.prepare(model, optimizer, data_loader)."
        )
    set_tensor_parallel(accelerator, size)
    accelerator.prepare_scheduler = set_scheduler_steps(accelerator.prepare_scheduler)
    accelerator.gather_for_metrics = own_samples
    accelerator.get_state_dict = functools.partial(_full_state_dict, accelerator)
    accelerator.save_state = functools.partial(_save_state, accelerator, accelerator.save_state)
    accelerator.load_state = functools.partial(_load_state, accelerator, accelerator.load_state)
    setattr(accelerator, _ADAPTED, True)


def own_samples(data: Any, use_gather_object: bool = False) -> Any:
    """Replaces the accelerator's gathering for metrics: every rank has all samples already."""
    return data


def _full_state_dict(accelerator: Any, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
    """``Accelerator.get_state_dict``: full tensors, on the CPU of every rank. A collective."""
    del unwrap  # nothing is wrapped
    found = dict(model.named_parameters(remove_duplicate=False))
    state = model.state_dict()
    return {name: _full(found.get(name, value)) if name in found else value for name, value in state.items()}


def _full(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (full_tensor_of(value) if isinstance(value, ShardedTensor) else value).cpu()


def _save_state(accelerator: Any, save: Any, output_dir: str | None = None, *args: Any, **options: Any) -> str:
    """``Accelerator.save_state``: model and optimizer from all ranks, each its shards."""
    model, optimizer = _only(accelerator)
    with without_prepared(accelerator):
        folder: str = save(output_dir, *args, **options)
    save_state(os.path.join(folder, STATE), model, optimizer)
    return folder


def _load_state(accelerator: Any, load: Any, input_dir: str | None = None, *args: Any, **options: Any) -> None:
    """``Accelerator.load_state``: what ``save_state`` has written, on any number of ranks."""
    model, optimizer = _only(accelerator)
    if input_dir is None:
        raise ValueError("load_state of a parallel model needs the directory: accelerator.load_state('checkpoint_0')")
    with without_prepared(accelerator):
        load(input_dir, *args, **options)
    load_state(os.path.join(os.path.expanduser(input_dir), STATE), model, optimizer)


def _only(accelerator: Any) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """The parallel model and its optimizer."""
    models, optimizers = prepared(accelerator)
    if len(models) != 1 or len(optimizers) > 1:
        raise ValueError(
            f"the accelerator has prepared {len(models)} models and {len(optimizers)} optimizers; with a parallel "
            "model it saves and loads one of each. Save the others with paraxis.save_state."
        )
    return models[0], plain_optimizer(optimizers[0]) if optimizers else None
