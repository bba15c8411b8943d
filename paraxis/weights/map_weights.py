"""Mapping a checkpoint to a model, from the headers alone, before anything is planned or loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ..context import ParallelExecutionCtx
from ..distributed.consensus import all_gather_object, on_all_ranks
from ..errors import CheckpointError
from ..tensor.parameter_meta import HashableSlice, ParameterMeta, ParameterSlice
from .init import model_init_fn, new_head_parameters, optional_parameters
from .load import load_buffers
from .matching import match
from .materialize import checksums
from .meta_init import tied_names
from .quantized.parameters import check_expected, compositions, from_plain, mark_quantized, quantize_inputs
from .quantized.pieces import Composition
from .quantized.registry import quantization_of
from .quantized.stored import Stored, find_stored, raise_problems, with_stored
from .same_files import check_same_files
from .weight_map import check_checkpoint, collect_weight_map, header_of
from .zero_rows import mark_zero_rows


def map_weights(
    model: nn.Module,
    folder: Path,
    ctx: ParallelExecutionCtx,
    use_cache: bool,
    variant: str | None = None,
    quantize: bool = False,
) -> None:
    """Set for every parameter which tensors of the checkpoint it is loaded from, and load the buffers. A collective.

    ``quantize``: the checkpoint is plain, and quantized while it is loaded, to what the model's configuration says.

    Raises:
        CheckpointError: on all ranks, if the checkpoint does not fit the model or the ranks see different files.
    """
    with on_all_ranks(ctx.world_group, "checking the checkpoint"):
        untrained = _match(model, folder, ctx, use_cache, variant, quantize)
    check_same_files(folder, ctx.weight_map.values(), ctx.world_group)
    if untrained and ctx.is_first:
        warnings.warn(_untrained_warning(untrained, folder), stacklevel=3)


def _match(
    model: nn.Module, folder: Path, ctx: ParallelExecutionCtx, use_cache: bool, variant: str | None, quantize: bool
) -> list[str]:
    """Match parameters with tensors of the checkpoint and check them all.

    Returns the parameters of a new head, which a checkpoint of the base model does not have: they are initialized.
    """
    named = getattr(getattr(model, "config", None), "transformers_weights", None)
    ctx.weight_map = collect_weight_map(folder, variant, named)
    prefix, tied = getattr(model, "base_model_prefix", ""), tied_names(model)
    header = header_of(ctx.weight_map)
    quantization = quantization_of(getattr(model, "config", None))
    stored_weights, weight_map = dict[str, Stored](), ctx.weight_map
    if quantization is not None and not quantize:
        stored_weights, weight_map = find_stored(ctx.weight_map, header, quantization, _module_test(model))
    keys, ctx.state.conversions = match(
        model,
        ctx.param_cache,
        tied,
        weight_map,
        read_cache=use_cache,
        write_cache=ctx.is_first,
        header=with_stored(header, stored_weights, _dtype_of(model)),
    )
    quantized = compositions(keys, ctx.state.conversions, stored_weights)
    new: dict[str, Composition] = {}
    if quantization is not None:
        if quantize:
            new = from_plain(model, quantization, keys, ctx.state.conversions, header)
        problems = mark_quantized(ctx.param_cache, quantized | new)
        problems += check_expected(model, quantization, ctx.param_cache, quantized | new)
        problems += quantize_inputs(model, quantized | new, ctx.current_device)
        raise_problems(quantization, problems)
    stored = {*keys, *(name for conversion in ctx.state.conversions for name in conversion.targets)}
    missing = [name for name in ctx.param_cache if name not in stored]
    untrained = new_head_parameters(model, missing, stored)
    unsaved = [*optional_parameters(model, missing), *untrained]
    for name in unsaved:
        _meta(ctx.param_cache[name]).init_fn = model_init_fn(model, name)
    expected = {name: p for name, p in ctx.param_cache.items() if name not in unsaved and name not in quantized}
    plain = {name: key for name, key in keys.items() if name not in quantized}
    check_checkpoint(expected, plain, ctx.weight_map, tied, [c for c in ctx.state.conversions if c.plain(quantized)])
    for name, key in keys.items():
        _meta(ctx.param_cache[name]).mapping = {HashableSlice(): ParameterSlice(source=key)}
    mark_zero_rows(model)
    load_buffers(model, ctx.weight_map, prefix)
    return untrained


def _untrained_warning(names: list[str], folder: Path) -> str:
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{str(folder)!r} holds the base model only: {some} {verb} not in it and will be "
        "initialized at random. Train the model before you use it."
    )


def check_same_values(ctx: ParallelExecutionCtx) -> None:
    """Raise, on all ranks, if they passed a module with different values. A collective."""
    answers = all_gather_object(ctx.world_group, checksums(ctx.param_cache), "comparing the weights of the module")
    for rank, theirs in enumerate(answers):
        differing = [n for n in {**theirs, **answers[0]} if theirs.get(n) != answers[0].get(n)]
        if differing:
            raise CheckpointError(
                f"the ranks hold different values: {len(differing)} parameters of rank {rank} differ from rank 0's "
                f"(first {differing[0]}). Set the same seed on all ranks before building the module, or load the same "
                "weights."
            )


def _module_test(model: nn.Module) -> Callable[[str], bool]:
    """Whether a name of the checkpoint, with its prefix or without, is that of a module."""
    names = {name for name, _ in model.named_modules()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return lambda name: name in names or prefix + name in names or name.removeprefix(prefix) in names


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _meta(parameter: nn.Parameter) -> ParameterMeta:
    return parameter.spec  # type: ignore[attr-defined,no-any-return]
