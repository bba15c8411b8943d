"""``transformers.Trainer`` with a parallel model.

A trainer on several ranks assumes that they are data-parallel: it feeds each of them different batches, wraps the model
in DDP, and saves on rank 0 only. For tensor-parallel ranks all three are wrong. This mixin tells the trainer's
accelerator that its ranks are tensor-parallel, so that all of them see the same batches and nothing is wrapped, and
every rank takes part in saving and loading. With a model that is not parallel it does nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer

from ..tensor.sharded_tensor import ShardedTensor
from ..weights.state import load_state, save_state

STATE = "parallel_state"
"""The folder in a checkpoint with the sharded state of the optimizer."""
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"  # the trainer's own files

_Base: Any = Trainer if TYPE_CHECKING else object


class ParallelTrainerMixin(_Base):
    """A mixin for any trainer class: ``class MyTrainer(ParallelTrainerMixin, Seq2SeqTrainer): ...``.

    Checkpoints have the model as ``save_pretrained`` writes it, and resume on any number of ranks.
    """

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks of the model; None if it is not parallel, or on one rank."""
        parameters = (p for p in self.model.parameters() if isinstance(p, ShardedTensor))
        first = next(parameters, None)
        found = first.group if first is not None else None
        return found if found is not None and dist.get_world_size(found) > 1 else None

    # -- the same batches on every rank, and no wrapper --------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and tell it that the ranks are tensor-parallel."""
        super().create_accelerator_and_postprocess()
        group = self.tp_group
        if group is None:
            return
        from accelerate import ParallelismConfig

        size = dist.get_world_size(group)
        if size != self.accelerator.num_processes:
            raise ValueError(
                f"the model is sharded over {size} ranks, but the trainer runs on {self.accelerator.num_processes}: "
                "these must be the same. On CPUs pass TrainingArguments(use_cpu=True); to combine tensor parallelism "
                "with data parallelism, write your own training loop."
            )
        # Set after construction: the accelerator's constructor refuses tensor parallelism on CPUs.
        state = self.accelerator.state
        state.parallelism_config = ParallelismConfig(tp_size=size)
        state.device_mesh = state.parallelism_config.get_device_mesh(self.accelerator.device.type)
        self.accelerator.gather_for_metrics = _own_samples
        self.gather_function = _own_samples

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
        save_state(os.path.join(output_dir, STATE), self.model, _plain(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.tp_group is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder, file = os.path.join(checkpoint, STATE), os.path.join(checkpoint, OPTIMIZER)
        if os.path.isdir(folder):
            load_state(folder, self.model, _plain(self.optimizer))
        elif os.path.isfile(file):  # written by a run that was not parallel
            optimizer = _plain(self.optimizer)
            optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
            shard_state(optimizer)
        scheduler = os.path.join(checkpoint, SCHEDULER)
        if os.path.isfile(scheduler):
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


class ParallelTrainer(ParallelTrainerMixin, Trainer):
    """``transformers.Trainer`` for models of :func:`paraxis.parallelize_model`, with the same arguments."""


def shard_state(optimizer: torch.optim.Optimizer) -> None:
    """Shard the full tensors of an optimizer's state as their parameters are sharded."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            full = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)
            if isinstance(parameter, ShardedTensor) and full and value.shape == parameter.shape:
                state[key] = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _own_samples(data: Any, use_gather_object: bool = False) -> Any:
    """Replaces the accelerator's gathering for metrics: every rank has all samples already."""
    return data


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the accelerator's wrapper."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
