"""``transformers.Trainer``, and trainers built on it, with a parallel model.

A trainer on several ranks assumes that they are data-parallel: it feeds each of them different batches, wraps the model
in DDP, and saves on rank 0 only. For tensor-parallel ranks all three are wrong. The mixin tells the trainer's
accelerator that its ranks are tensor-parallel, so that all of them see the same batches and nothing is wrapped, and
every rank takes part in saving and loading. With a model that is not parallel it does nothing.

:func:`adapt_trainer` adds the mixin to any trainer that is constructed with a parallel model. transformers supports
tensor parallelism of models that it has sharded itself; it does not save their optimizer, and refuses CPUs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..compat.accelerate import plain_optimizer
from ..compat.transformers import trainer_class, use_cpu_ranks
from ..tensor.sharded_tensor import ShardedTensor
from ..weights.state import load_state, save_state
from .accelerate import STATE, make_tensor_parallel, own_samples, tensor_parallel_group
from .peft import save_adapters_from_all_ranks

if TYPE_CHECKING:
    from transformers import Trainer

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"  # the trainer's own files

_ADAPTED = "_paraxis_adapted"
"""Marks the method of ``Trainer`` that looks for parallel models."""

_Base: Any = Trainer if TYPE_CHECKING else object


class ParallelTrainerMixin(_Base):
    """A mixin for any trainer class: ``class MyTrainer(ParallelTrainerMixin, Seq2SeqTrainer): ...``.

    Checkpoints have the model as ``save_pretrained`` writes it, and resume on any number of ranks.
    """

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks of the model; None if it is not parallel, or on one rank."""
        return tensor_parallel_group(self.model)

    # -- the same batches on every rank, and no wrapper --------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and tell it that the ranks are tensor-parallel."""
        _create_accelerator(self, super().create_accelerator_and_postprocess)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self.tp_group is None:
            return super()._wrap_model(model, training, dataloader)
        # As for evaluation: mixed precision without a wrapper. A prepared model is not prepared again.
        return self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model from all ranks, in the format of an unsharded one."""
        if self.tp_group is None or self.args.should_save:
            super().save_model(output_dir, _internal_call)
        else:
            self.model.save_pretrained(output_dir or self.args.output_dir, is_main_process=False)
        if self.tp_group is not None:
            self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.tp_group is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_state(os.path.join(output_dir, STATE), self.model, plain_optimizer(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.tp_group is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder, file = os.path.join(checkpoint, STATE), os.path.join(checkpoint, OPTIMIZER)
        if os.path.isdir(folder):
            load_state(folder, self.model, plain_optimizer(self.optimizer))
        elif os.path.isfile(file):  # written by a run that was not parallel
            optimizer = plain_optimizer(self.optimizer)
            optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
            shard_state(optimizer)
        scheduler = os.path.join(checkpoint, SCHEDULER)
        if os.path.isfile(scheduler):
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


def _create_accelerator(trainer: Any, create: Callable[[], None]) -> None:
    group = tensor_parallel_group(trainer.model)
    if group is None:
        create()
        return
    if next(trainer.model.parameters()).device.type == "cpu":
        use_cpu_ranks(trainer.args)
    create()
    make_tensor_parallel(trainer.accelerator, group)
    trainer.gather_function = own_samples
    save_adapters_from_all_ranks(trainer.model, group)


def adapt_trainer() -> None:
    """Let every ``Trainer`` that is constructed with a parallel model take the mixin. Done once.

    The accelerator is the first thing that a trainer creates once it has its model.
    """
    base = trainer_class()
    if base is None or hasattr(base.create_accelerator_and_postprocess, _ADAPTED):
        return
    create = base.create_accelerator_and_postprocess

    @functools.wraps(create)
    def with_parallel_models(trainer: Any) -> None:
        if isinstance(trainer, ParallelTrainerMixin) or tensor_parallel_group(trainer.model) is None:
            create(trainer)
        else:
            cls: Any = type(trainer)
            trainer.__class__ = _with_mixin(cls)
            _create_accelerator(trainer, functools.partial(create, trainer))

    setattr(with_parallel_models, _ADAPTED, True)
    base.create_accelerator_and_postprocess = with_parallel_models


@functools.cache
def _with_mixin(cls: Any) -> type:
    """A trainer class with the mixin; named as before, since trainers write their names into model cards."""
    return type(cls.__name__, (ParallelTrainerMixin, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def shard_state(optimizer: torch.optim.Optimizer) -> None:
    """Shard the full tensors of an optimizer's state as their parameters are sharded."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            full = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)
            if isinstance(parameter, ShardedTensor) and full and value.shape == parameter.shape:
                state[key] = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
