"""Materializing planned parameters: loading, slicing or initializing their shards."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping

import torch
from torch import nn

from ..config import Config
from ..context import ParallelExecutionCtx
from ..data_parallel import setup_data_parallel
from ..distributed.consensus import all_gather_object, on_all_ranks
from ..tensor.parameter_meta import ParameterMeta
from ..tensor.quantized import QuantizedWeight
from ..tensor.sharded_tensor import ShardedTensor
from .init import common_seed, initialize_parameters, initialize_quantized
from .load import load_converted, load_parameters, slice_parameters
from .quantized.load import load_quantized, quantize_from_files
from .zero_rows import zero_rows


def materialize_parameters(ctx: ParallelExecutionCtx, config: Config) -> None:
    """Load, slice or initialize every parameter that has a placement and no storage yet. A collective."""
    pending = {
        name: p
        for name, p in ctx.param_cache.items()
        if isinstance(p, ShardedTensor) and _meta(p).need_initialize and _meta(p).placement is not None
    }
    if not pending:
        return
    setup_data_parallel(pending, ctx, config)
    seed = common_seed(config.init_seed, ctx.world_group)
    with on_all_ranks(ctx.world_group, "loading the weights"), ctx.timed("load"):
        device = ctx.current_device
        own = {name: p for name, p in pending.items() if _meta(p).source is not None}
        slice_parameters(own, ctx.rank, device)
        encoded = {name: p for name, p in pending.items() if name not in own and _meta(p).quantized is not None}
        done = {*own, *encoded}
        keys = {name: key for name, p in pending.items() if name not in done and (key := _key(p, ctx))}
        stored = {name: pending[name] for name in keys}
        progress = config.show_progress and ctx.is_first
        load_parameters(stored, keys, ctx.weight_map, ctx.rank, device, progress)
        converted = {name for conversion in ctx.state.conversions for name in conversion.targets}
        in_files = {name: p for name, p in encoded.items() if _quantized(p).source.first.keys}
        load_quantized(in_files, ctx.weight_map, ctx.rank, device, progress)
        plain = {name: p for name, p in pending.items() if name not in encoded}
        load_converted(plain, ctx.state.conversions, ctx.weight_map, ctx.rank, device, progress)
        zero_rows(plain.values(), ctx.rank)
        rest = {name: p for name, p in pending.items() if name not in {*done, *stored, *converted}}
        initialize_parameters(rest, config.weight_init_fn, seed, ctx.rank, device)
        others = {name: p for name, p in encoded.items() if name not in in_files}
        converted_here = {n: p for n, p in others.items() if _quantized(p).source.first.key in ctx.weight_map}
        quantize_from_files(converted_here, ctx.weight_map, ctx.rank, device, progress)
        new = {name: p for name, p in others.items() if name not in converted_here}
        initialize_quantized(new, config.weight_init_fn, seed, ctx.rank, device)
    if config.check_finite:
        _warn_of_non_finite(pending, ctx)


def _warn_of_non_finite(parameters: Mapping[str, nn.Parameter], ctx: ParallelExecutionCtx) -> None:
    """Warn on rank 0 of NaN and infinity in the shards of any rank. A collective."""
    plain = {n: p for n, p in parameters.items() if _meta(p).quantized is None}  # of the others, scales were checked
    found = [n for n, p in plain.items() if not bool(torch.isfinite(p.local).all())]  # type: ignore[attr-defined]
    names = sorted({name for names in all_gather_object(ctx.world_group, found, "looking for NaN") for name in names})
    if names and ctx.is_first:
        some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        warnings.warn(f"NaN or infinity in the weights of {some}", stacklevel=2)


def _meta(parameter: nn.Parameter) -> ParameterMeta:
    meta = parameter.spec  # type: ignore[attr-defined]
    assert isinstance(meta, ParameterMeta)
    return meta


def _quantized(parameter: nn.Parameter) -> QuantizedWeight:
    found = _meta(parameter).quantized
    assert found is not None
    return found


def _key(parameter: nn.Parameter, ctx: ParallelExecutionCtx) -> str | None:
    """The key of the checkpoint's tensor that this parameter is loaded from."""
    meta = _meta(parameter)
    for piece in meta.mapping.values():
        if piece.source is not None:
            return piece.source
    return meta.name if meta.name in ctx.weight_map else None


def checksums(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """A checksum of each parameter that came with values, to compare between ranks."""
    sums = {}
    for name, parameter in parameters.items():
        source = _meta(parameter).source
        if source is not None:
            raw = source.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            sums[name] = hashlib.blake2b(raw.numpy().data, digest_size=8).hexdigest()
    return sums
