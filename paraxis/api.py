"""``parallelize_model``: from a model's name, directory or module to a tensor-parallel model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .config import RENAMED, Config
from .context import ParallelExecutionCtx
from .data_parallel import check_option
from .distributed.consensus import all_gather_object, on_all_ranks
from .errors import CheckpointError
from .plan.make import make_plan
from .runtime.model_methods import install_model_methods
from .runtime.redirect_forward import compiled_call_of
from .tensor.parameter_meta import HashableSlice, ParameterMeta, ParameterSlice
from .tensor.sharded_tensor import ShardedTensor
from .weights.hub import check_transformers_version, load_config_and_class, resolve_checkpoint
from .weights.init import as_the_model_does, left_out, new_head
from .weights.load import load_buffers
from .weights.matching import match
from .weights.materialize import checksums
from .weights.meta_init import MetaAwareMethodsPatcher, attach_parameter_meta, tied_names
from .weights.same_files import check_same_files
from .weights.weight_map import check_checkpoint, collect_weight_map


def parallelize_model(
    model: str | os.PathLike[str] | nn.Module,
    parallel_ctx: ParallelExecutionCtx,
    *model_args: Any,
    revision: str = "main",
    cache_dir: str | None = None,
    local_files_only: bool = False,
    skip_load_weights: bool = False,
    torch_dtype: torch.dtype | str | None = None,
    **kwargs: Any,
) -> Any:
    """Make a model tensor-parallel over the ranks of ``parallel_ctx``. Every rank calls it alike.

    When it returns, the plan is solved (``parallel_ctx.plan``), each rank has its shard of the weights, and the model
    is ready to call: same class, same ``forward``, ``generate``, ``train``, ``state_dict``.

    Args:
        model: A Hub id, a directory written by ``save_pretrained``, or a module.
        parallel_ctx: The process group, or a mesh with data-parallel ranks too, and the device.
        model_args: More positional arguments for the model's constructor.
        revision: Revision on the Hub.
        cache_dir: Where downloads are kept.
        local_files_only: Never go to the network.
        skip_load_weights: Initialize the weights with ``Config.weight_init_fn`` instead of loading them; the same seed
            gives the same global weights on any number of ranks.
        torch_dtype: Dtype of the parameters; by default what the config says.
        kwargs: ``example_inputs`` (a tensor, a tuple of positional or a dict of keyword arguments: what to plan the
            model with; needed for modules that are not from transformers), then fields of :class:`Config`, then of the
            model's config; what is left goes to the model's constructor.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ImportError: transformers is too old.
        ValueError: sizes that do not divide over the ranks, or (``CheckpointError``) a checkpoint that does not fit.
        CaptureError: the model's forward cannot be captured; the message has the line.
    """
    _check_distributed(parallel_ctx)
    config, kwargs = split_config(kwargs)
    check_option(parallel_ctx, config)
    examples = kwargs.pop("example_inputs", None)
    folder = None
    if not isinstance(model, nn.Module):
        check_transformers_version()
        folder = resolve_checkpoint(
            model, revision, cache_dir, local_files_only, weights=not skip_load_weights, group=parallel_ctx.world_group
        )
        with on_all_ranks(parallel_ctx.world_group, f"building {os.fspath(model)!r}"):
            model = _build(folder, model_args, torch_dtype, kwargs)
    elif kwargs:
        raise TypeError(f"unknown options for a module: {', '.join(kwargs)}")
    parallelized = attach(model, parallel_ctx, torch_dtype if folder is None else None)
    if skip_load_weights:
        for parameter in parallel_ctx.param_cache.values():
            _meta(parameter).source = None
    if folder is not None and not skip_load_weights:
        with on_all_ranks(parallel_ctx.world_group, "checking the checkpoint"):
            made_up = _map_weights(parallelized, folder, parallel_ctx, config.cache_plans)
        check_same_files(folder, parallel_ctx.weight_map.values(), parallel_ctx.world_group)
        if made_up and parallel_ctx.is_first:
            warnings.warn(_not_trained(made_up, folder), stacklevel=2)
    _check_same_weights(parallel_ctx)
    call = compiled_call_of(parallelized, parallel_ctx, config)
    make_plan(call, parallel_ctx, config, examples)
    if hasattr(parallelized, "generation_config") and folder is not None:
        _load_generation_config(parallelized, folder)
    install_model_methods(parallelized, parallel_ctx, call)
    return parallelized


# -- the steps -----------------------------------------------------------------------------------------------------


def _check_distributed(ctx: ParallelExecutionCtx) -> None:
    if not dist.is_available() or not dist.is_initialized() or ctx.tp_group is None:
        raise RuntimeError(
            "torch.distributed is not initialized, so there are no ranks to split the model over. Start the program "
            "with `torchrun --nproc-per-node=N script.py` and call `torch.distributed.init_process_group()` first, "
            "then pass the group: ParallelExecutionCtx(tp_group=torch.distributed.group.WORLD, current_device=...)."
        )


def split_config(kwargs: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The fields of :class:`Config` among keyword arguments, and the others."""
    names = {*(f.name for f in fields(Config)), *RENAMED}
    config = Config(**{k: v for k, v in kwargs.items() if k in names})
    return config, {k: v for k, v in kwargs.items() if k not in names}


def _build(folder: Path, model_args: Sequence[Any], torch_dtype: Any, kwargs: Mapping[str, Any]) -> nn.Module:
    """The model without memory, in evaluation mode."""
    model_config, model_cls, rest = load_config_and_class(folder, dict(kwargs))
    before = torch.get_default_dtype()
    model_config.dtype = _dtype(torch_dtype, model_config)
    torch.set_default_dtype(model_config.dtype)
    try:
        with MetaAwareMethodsPatcher():
            model = model_cls(model_config, *model_args, **rest).eval()
    finally:
        torch.set_default_dtype(before)
    _keep_precision(model, model_config.dtype)
    return model


def _keep_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters and buffers the dtype that the model's class asks for, whatever the rest has."""
    from transformers.core_model_loading import build_glob_alternation

    wanted = model._get_dtype_plan(dtype)  # type: ignore[operator]
    if not wanted:
        return
    pattern, globs, _ = build_glob_alternation(list(wanted))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found = pattern.search(name)
        if found is not None and found.lastgroup is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(wanted[globs[found.lastgroup]])


def build_on_meta(source: Any, torch_dtype: Any, kwargs: Mapping[str, Any]) -> nn.Module:
    """The model of a Hub id, a directory or a configuration, without memory."""
    import tempfile

    if hasattr(source, "to_dict"):  # a configuration: the class that it names, or the language model of its type
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        source = type(source).from_dict({**source.to_dict()})
        if not source.architectures:
            source.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(source)].__name__]
        with tempfile.TemporaryDirectory() as folder:
            source.save_pretrained(folder)
            return _build(Path(folder), (), torch_dtype, kwargs)
    return _build(resolve_checkpoint(source, weights=False), (), torch_dtype, kwargs)


def _dtype(wanted: torch.dtype | str | None, model_config: Any) -> torch.dtype:
    if wanted is None or wanted == "auto":
        wanted = getattr(model_config, "dtype", None) or torch.float32
    dtype = getattr(torch, wanted.removeprefix("torch."), None) if isinstance(wanted, str) else wanted
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch_dtype={wanted!r} is not a dtype; use for example torch.bfloat16, 'bfloat16' or 'auto'")
    return dtype


def attach(model: nn.Module, ctx: ParallelExecutionCtx, dtype: Any) -> nn.Module:
    """Replace the parameters by empty sharded ones; the context starts afresh."""
    if any(isinstance(p, ShardedTensor) and p._local.numel() for p in model.parameters()):
        raise RuntimeError("this model is already parallel: call parallelize_model on a model once")
    if dtype is not None and not isinstance(dtype, str):
        model.to(dtype)
    ctx.plan, ctx.compile_times, ctx.state.grad_reducer = None, 0, None
    ctx.example_inputs, ctx.last_optimized_graph_module, ctx.state.repeats = [], None, {}
    ctx.state.conversions = []
    ctx.parallel_layer_cache.clear()
    ctx.param_cache.clear()
    ctx.param_cache.update(attach_parameter_meta(model, ctx.current_device, ctx.tp_group))
    return model


def _map_weights(model: nn.Module, folder: Path, ctx: ParallelExecutionCtx, remember: bool) -> list[str]:
    """Match parameters with tensors of the checkpoint and check them all, from the headers alone.

    Returns the parameters that a checkpoint of the base model alone does not have: they are initialized.
    """
    ctx.weight_map = collect_weight_map(folder)
    prefix, tied = getattr(model, "base_model_prefix", ""), tied_names(model)
    keys, ctx.state.conversions = match(model, ctx.param_cache, tied, ctx.weight_map, remember=remember, keep=ctx.is_first)
    stored = {*keys, *(name for conversion in ctx.state.conversions for name in conversion.targets)}
    absent = [name for name in ctx.param_cache if name not in stored]
    made_up = new_head(model, absent, stored)
    unsaved = [*left_out(model, absent), *made_up]
    for name in unsaved:
        _meta(ctx.param_cache[name]).init_fn = as_the_model_does(model, name)
    expected = {name: p for name, p in ctx.param_cache.items() if name not in unsaved}
    check_checkpoint(expected, keys, ctx.weight_map, tied, ctx.state.conversions)
    for name, key in keys.items():
        _meta(ctx.param_cache[name]).mapping = {HashableSlice(): ParameterSlice(source=key)}
    load_buffers(model, ctx.weight_map, prefix)
    return made_up


def _not_trained(names: list[str], folder: Path) -> str:
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{str(folder)!r} holds the base model alone: {some} {verb} not in it and will be "
        "initialized at random. Train the model before you use what it gives."
    )


def _check_same_weights(ctx: ParallelExecutionCtx) -> None:
    """A module that comes with values must come with the same ones on every rank."""
    mine = checksums(ctx.param_cache)
    answers = all_gather_object(ctx.world_group, mine, "comparing the weights of the module")
    for rank, theirs in enumerate(answers):
        differing = [n for n in {**theirs, **answers[0]} if theirs.get(n) != answers[0].get(n)]
        if differing:
            raise CheckpointError(
                f"the ranks hold different values: {len(differing)} parameters of rank {rank} differ from rank 0's "
                f"(first {differing[0]}). Seed all ranks alike before building the module, or load the same weights."
            )


def _load_generation_config(model: nn.Module, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _meta(parameter: nn.Parameter) -> ParameterMeta:
    return parameter._spec  # type: ignore[attr-defined,no-any-return]
