"""Building a model on the meta device, and attaching metadata to its parameters."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..compat.transformers import dtype_by_name
from ..config import names_of_config
from ..context import EngineState, ParallelExecutionCtx
from ..distributed.consensus import on_all_ranks
from ..errors import CheckpointError
from ..tensor.sharded_tensor import ShardedTensor
from .hub import is_first_on_machine, load_config_and_class, resolve_checkpoint
from .meta_init import MetaAwareMethodsPatcher, attach_parameter_meta
from .pretrained_options import (
    PretrainedOptions,
    check_constructor_options,
    names_of_options,
    split_pretrained_options,
)
from .quantized.parameters import mark_by_configuration
from .quantized.registry import quantization_of, set_quantization
from .weight_map import collect_weight_map, float_dtype


def build_model(
    folder: Path,
    model_args: Sequence[Any],
    torch_dtype: Any,
    kwargs: Mapping[str, Any],
    options: PretrainedOptions | None = None,
) -> nn.Module:
    """The model of a directory on the meta device, in evaluation mode."""
    options = options or PretrainedOptions()
    model_config, model_cls, rest = load_config_and_class(folder, dict(kwargs), options)
    if options.quantization_config is not None:
        set_quantization(model_config, options.quantization_config)
    fields = {name for name in vars(model_config) if not name.startswith("_")}
    check_constructor_options(model_cls, rest, {*names_of_config(), *names_of_options(), "example_inputs", *fields})
    before = torch.get_default_dtype()
    model_config.dtype = _dtype(torch_dtype, model_config, folder, options)
    torch.set_default_dtype(model_config.dtype)
    try:
        with MetaAwareMethodsPatcher():
            model = model_cls(model_config, *model_args, **rest).eval()
    finally:
        torch.set_default_dtype(before)
    _cast_exceptions(model, model_config.dtype)
    return model


def build_on_ranks(
    folder: Path,
    model_args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: PretrainedOptions,
    group: dist.ProcessGroup | None,
    what: str,
) -> nn.Module:
    """The model of a directory on every rank. A collective.

    Code that comes with the model is copied into a cache of transformers before it is imported: the first rank of each
    machine does that while the others wait.
    """
    first = not options.trust_remote_code or is_first_on_machine(group, what)
    model = None
    for turn in (True, False) if options.trust_remote_code else (True,):
        with on_all_ranks(group, what):
            if first is turn:
                model = build_model(folder, model_args, options.dtype, kwargs, options)
    assert model is not None
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
    options, kwargs = split_pretrained_options(kwargs)
    torch_dtype = torch_dtype if torch_dtype is not None else options.dtype
    if hasattr(source, "to_dict"):  # a configuration: the class that it names, or the language model of its type
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        source = type(source).from_dict({**source.to_dict()})
        if not source.architectures:
            source.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(source)].__name__]
        with tempfile.TemporaryDirectory() as folder:
            source.save_pretrained(folder)
            return build_model(Path(folder), (), torch_dtype, kwargs, options)
    found = resolve_checkpoint(source, weights=False, options=options)
    return build_model(found, (), torch_dtype, kwargs, options)


def _dtype(dtype: torch.dtype | str | None, model_config: Any, folder: Path, options: PretrainedOptions) -> torch.dtype:
    if dtype is None or dtype == "auto":
        dtype = getattr(model_config, "dtype", None) or _stored_dtype(model_config, folder, options) or torch.float32
    return dtype_of(dtype)


def _stored_dtype(model_config: Any, folder: Path, options: PretrainedOptions) -> torch.dtype | None:
    """The dtype of the weights in the folder, which a configuration without one leaves open; None without weights."""
    try:
        found = collect_weight_map(folder, options.variant, getattr(model_config, "transformers_weights", None))
    except CheckpointError:  # no weights are needed to plan, or to initialize them
        return None
    return float_dtype(found)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype that a user's argument names."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is not a dtype; use for example torch.bfloat16, 'bfloat16' or 'auto'")
    return found


def quantize_by_configuration(model: nn.Module, ctx: ParallelExecutionCtx, known_only: bool = False) -> None:
    """Note which parameters are quantized according to the model's configuration, where no checkpoint says it.

    ``known_only``: leave the parameters as they are if the method is not known.
    """
    quantization = quantization_of(getattr(model, "config", None), known_only)
    if quantization is not None:
        mark_by_configuration(model, ctx.param_cache, quantization)


def attach(model: nn.Module, ctx: ParallelExecutionCtx, dtype: Any = None) -> None:
    """Replace the parameters by empty sharded ones with :class:`ParameterMeta`, and reset the context."""
    if any(isinstance(p, ShardedTensor) and p.local.numel() for p in model.parameters()):
        raise RuntimeError("this model is already parallel: call parallelize_model on a model once")
    if dtype is not None and dtype != "auto":
        model.to(dtype_of(dtype))
    ctx.plan, ctx.compile_times = None, 0
    ctx.example_inputs, ctx.last_optimized_graph_module = [], None
    ctx.state = EngineState(simulated=ctx.state.simulated)
    ctx.parallel_layer_cache.clear()
    ctx.param_cache.clear()
    ctx.param_cache.update(attach_parameter_meta(model, ctx.current_device, ctx.tp_group))
