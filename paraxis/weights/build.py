"""Building a model on the meta device, and attaching metadata to its parameters."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compat.transformers import dtype_by_name
from ..context import EngineState, ParallelExecutionCtx
from ..tensor.sharded_tensor import ShardedTensor
from .hub import load_config_and_class, resolve_checkpoint
from .meta_init import MetaAwareMethodsPatcher, attach_parameter_meta


def build_model(folder: Path, model_args: Sequence[Any], torch_dtype: Any, kwargs: Mapping[str, Any]) -> nn.Module:
    """The model of a directory on the meta device, in evaluation mode."""
    model_config, model_cls, rest = load_config_and_class(folder, dict(kwargs))
    before = torch.get_default_dtype()
    model_config.dtype = _dtype(torch_dtype, model_config)
    torch.set_default_dtype(model_config.dtype)
    try:
        with MetaAwareMethodsPatcher():
            model = model_cls(model_config, *model_args, **rest).eval()
    finally:
        torch.set_default_dtype(before)
    _cast_exceptions(model, model_config.dtype)
    return model


def _cast_exceptions(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers for which the model's class requires another dtype than the rest has."""
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    exceptions = dtype_by_name(model, dtype, [name for name, _ in tensors])
    for name, tensor in tensors:
        if name in exceptions and tensor.is_floating_point():
            tensor.data = tensor.data.to(exceptions[name])


def build_on_meta(source: Any, torch_dtype: Any, kwargs: Mapping[str, Any]) -> nn.Module:
    """The model of a Hub id, a directory or a configuration, on the meta device."""
    if hasattr(source, "to_dict"):  # a configuration: the class that it names, or the language model of its type
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        source = type(source).from_dict({**source.to_dict()})
        if not source.architectures:
            source.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(source)].__name__]
        with tempfile.TemporaryDirectory() as folder:
            source.save_pretrained(folder)
            return build_model(Path(folder), (), torch_dtype, kwargs)
    return build_model(resolve_checkpoint(source, weights=False), (), torch_dtype, kwargs)


def _dtype(dtype: torch.dtype | str | None, model_config: Any) -> torch.dtype:
    if dtype is None or dtype == "auto":
        dtype = getattr(model_config, "dtype", None) or torch.float32
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch_dtype={dtype!r} is not a dtype; use for example torch.bfloat16, 'bfloat16' or 'auto'")
    return found


def attach(model: nn.Module, ctx: ParallelExecutionCtx, dtype: Any = None) -> None:
    """Replace the parameters by empty sharded ones with :class:`ParameterMeta`, and reset the context."""
    if any(isinstance(p, ShardedTensor) and p.local.numel() for p in model.parameters()):
        raise RuntimeError("this model is already parallel: call parallelize_model on a model once")
    if dtype is not None and not isinstance(dtype, str):
        model.to(dtype)
    ctx.plan, ctx.compile_times = None, 0
    ctx.example_inputs, ctx.last_optimized_graph_module = [], None
    ctx.state = EngineState(simulated=ctx.state.simulated)
    ctx.parallel_layer_cache.clear()
    ctx.param_cache.clear()
    ctx.param_cache.update(attach_parameter_meta(model, ctx.current_device, ctx.tp_group))
