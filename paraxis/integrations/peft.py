"""Saving the adapters of a parallel model with PEFT.

PEFT selects what it saves from a state dict. It first gets one of meta tensors, which shows what it would save; only
that is gathered, and rank 0 lets PEFT write it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ..compat.transformers import has_adapters_loaded
from ..context import ParallelExecutionCtx
from ..distributed.consensus import on_all_ranks
from ..weights.save import gather, persistent_buffers


def has_adapters(model: Any) -> bool:
    """Whether this model saves adapters only: a PEFT model, or a transformers model with adapters."""
    return hasattr(model, "peft_config") and (hasattr(model, "get_base_model") or has_adapters_loaded(model))


def save_adapters(model: Any, ctx: ParallelExecutionCtx, directory: str | os.PathLike[str], **kwargs: Any) -> None:
    """``save_pretrained`` of a model with adapters, from all ranks. A collective; if it fails, it fails on all."""
    what = f"saving adapters to {os.fspath(directory)!r}"
    with on_all_ranks(ctx.world_group, what):
        tensors: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(persistent_buffers(model))
        selected = _selected(model, tensors, kwargs)
    state_dict = {name: gather(tensors[name], ctx) for name in selected}
    with on_all_ranks(ctx.world_group, what):
        if ctx.is_first:
            type(model).save_pretrained(model, directory, state_dict=state_dict, **kwargs)


def save_adapters_from_all_ranks(model: Any, group: dist.ProcessGroup) -> None:
    """Make ``save_pretrained`` of a PEFT model around a parallel one a collective, if it is not one already."""
    if not has_adapters(model) or "save_pretrained" in vars(model):
        return
    ctx = ParallelExecutionCtx(tp_group=group, current_device=next(model.parameters()).device)

    def save_pretrained(save_directory: Any, **kwargs: Any) -> None:
        for name in ("is_main_process", "safe_serialization", "state_dict"):  # all ranks gather, the first one writes
            kwargs.pop(name, None)
        save_adapters(model, ctx, save_directory, **kwargs)

    model.save_pretrained = save_pretrained


def _selected(model: Any, tensors: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """The names of what PEFT would save, in the order of the model."""
    from peft import get_peft_model_state_dict

    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in tensors.items()}
    selected = set()
    for adapter in options.get("selected_adapters") or list(model.peft_config):
        layers = {k: options[k] for k in ("save_embedding_layers",) if k in options}
        found = get_peft_model_state_dict(model, state_dict=dict(empty), adapter_name=adapter, **layers)
        selected |= set(map(id, found.values()))
    return [name for name, tensor in empty.items() if id(tensor) in selected]
