"""``parallelize_model``: from a model's name, directory or module to a tensor-parallel model, step by step."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .capture.dummy_inputs import example_calls
from .compat.generation import load_generation_settings
from .compat.inductor import start_compile_workers
from .config import Config, names_of_config, split_config
from .context import ParallelExecutionCtx
from .data_parallel import check_option
from .distributed.activity import collective_call
from .distributed.consensus import limit_waits
from .plan.apply import apply_plan
from .plan.make import NotOneGraph, make_plan
from .runtime.check_ranks import setup_checks
from .runtime.compiled_call import CompiledCall, plan_by_running, plan_rest_by_running
from .runtime.model_methods import install_model_methods
from .runtime.redirect_forward import compiled_call_of
from .utils.memory import gc_paused
from .weights.build import attach, build_on_ranks, quantize_by_configuration
from .weights.hub import check_transformers_version, resolve_checkpoint
from .weights.map_weights import check_same_values, map_weights
from .weights.materialize import materialize_parameters
from .weights.pretrained_options import split_pretrained_options, unknown_options


@collective_call("parallelize_model")
@gc_paused()
def parallelize_model(
    model: str | os.PathLike[str] | nn.Module,
    parallel_ctx: ParallelExecutionCtx,
    *model_args: Any,
    revision: str = "main",
    cache_dir: str | None = None,
    local_files_only: bool = False,
    skip_load_weights: bool = False,
    dtype: torch.dtype | str | None = None,
    torch_dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
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
        cache_dir: Where downloads are cached.
        local_files_only: Never go to the network.
        skip_load_weights: Initialize the weights with ``Config.weight_init_fn`` instead of loading them; the same seed
            gives the same global weights on any number of ranks.
        dtype: Dtype of the parameters; by default, and with ``"auto"``, what the config or else the checkpoint says.
        torch_dtype: The former name of ``dtype``.
        trust_remote_code: Run the code that comes with the model, for classes that transformers does not have.
        kwargs: ``example_inputs`` (a tensor, a tuple of positional or a dict of keyword arguments, or a list of dicts
            for several kinds of calls: what to plan the model with), then fields of :class:`Config`, then other
            arguments of ``from_pretrained`` (``token``, ``subfolder``, ``variant``, ``attn_implementation``, ...; those
            that cannot have their effect are refused with what to do), then fields of the model's config; what is left
            goes to the model's constructor. Example inputs are needed for modules that are not from transformers, and
            for models whose inputs cannot be derived from their signature and configuration; the error or warning then
            says which arguments to pass.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: an option that nothing takes; the message suggests one.
        ImportError: transformers is too old.
        ValueError: sizes that do not divide over the ranks, or (``CheckpointError``) a checkpoint that does not fit.
        CaptureError: the model's forward cannot be captured; the message has the line.
    """
    _check_distributed(parallel_ctx)
    config, kwargs = split_config(kwargs)
    for group in (parallel_ctx.tp_group, parallel_ctx.world_group):
        limit_waits(group, config.sync_timeout)
    check_option(parallel_ctx, config)
    if parallel_ctx.current_device.type == "cuda" and config.compile is not None:
        start_compile_workers()  # they are there when the weights are
    examples = kwargs.pop("example_inputs", None)
    folder, dtype, group = None, dtype if dtype is not None else torch_dtype, parallel_ctx.world_group
    # Resolve the checkpoint and build the model on the meta device.
    if not isinstance(model, nn.Module):
        check_transformers_version()
        hub = {"revision": revision, "cache_dir": cache_dir, "local_files_only": local_files_only}
        options, kwargs = split_pretrained_options(
            {**kwargs, **hub, "dtype": dtype, "trust_remote_code": trust_remote_code}
        )
        folder = resolve_checkpoint(model, weights=not skip_load_weights, group=group, options=options)
        model = build_on_ranks(folder, model_args, kwargs, options, group, f"building {os.fspath(model)!r}")
    elif kwargs:
        known = {*names_of_config(), "example_inputs", "dtype", "skip_load_weights"}
        raise unknown_options(kwargs, known, "or it is one for checkpoints, and the model is a module")
    # Attach ParameterMeta, and note where every parameter is loaded from.
    attach(model, parallel_ctx, dtype if folder is None else None)
    if skip_load_weights:
        for parameter in parallel_ctx.param_cache.values():
            parameter.spec.source = None  # type: ignore[attr-defined]
        quantize_by_configuration(model, parallel_ctx)
    elif folder is not None:
        quantize = options.quantization_config is not None
        map_weights(model, folder, parallel_ctx, config.cache_plans, options.variant, quantize)
    check_same_values(parallel_ctx)
    # Make the plan, apply it, load the weights.
    call = compiled_call_of(model, parallel_ctx, config)
    _plan_and_load(call, parallel_ctx, config, examples)
    # Install what makes it a parallel model.
    if folder is not None:
        load_generation_settings(model, folder, options.generation_config)
    setup_checks(parallel_ctx, config)
    install_model_methods(model, parallel_ctx, call)
    return model


def _plan_and_load(call: CompiledCall, ctx: ParallelExecutionCtx, config: Config, examples: Any) -> None:
    plan = make_plan(call.module, ctx, config, examples)  # capture, solve; or a plan of the user or the cache
    gc.collect()  # once, of what building and planning have left, before the weights take its place
    calls = example_calls(call.module, examples, ctx.current_device, config.objective)
    if isinstance(plan, NotOneGraph):  # each of its graphs is planned, applied and loaded when a first call meets it
        plan_by_running(call, calls, plan.reason)
        return
    if plan.breaks and plan.unplanned and config.plan is None:  # so are those of a call that is not one graph
        plan_rest_by_running(call, calls, plan, derived=examples is None)
        return
    apply_plan(plan, ctx)
    materialize_parameters(ctx, config)


def _check_distributed(ctx: ParallelExecutionCtx) -> None:
    if not dist.is_available() or not dist.is_initialized() or ctx.tp_group is None:
        raise RuntimeError(
            "torch.distributed is not initialized, so there are no ranks to shard the model over. Start the program "
            "with `torchrun --nproc-per-node=N script.py` and make the context with `paraxis.init()`; or call "
            "`torch.distributed.init_process_group()` first, and pass the group: "
            "ParallelExecutionCtx(tp_group=torch.distributed.group.WORLD, current_device=...)."
        )
