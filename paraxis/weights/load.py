"""Reading weights: each rank reads its own slices, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ..core import HashableSlice, ParameterMeta, ParameterSlice
from ..distributed.redistribute import slice_box
from ..meta import parameter_meta
from ..placement import Placement, Ranges, Shard, local_index, local_shape
from ..sharded import ShardedTensor, materialize
from .convert import Conversion
from .errors import CheckpointError
from .weight_map import match_parameters, open_file

# A box of more pieces than this is read with what lies between them: one large read beats many small ones.
_MAX_PIECES = 128


def load_shard(
    handle: Any,
    key: str,
    placement: Placement,
    shape: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The shard that ``rank`` holds of tensor ``key`` in an open safetensors file, in memory of its own.

    Args:
        handle: The file, as given by ``safetensors.safe_open``.
        key: The tensor's name in the file.
        placement: Where its elements live.
        shape: Its global shape.
        rank: Whose shard to read.
        dtype: What to convert to.
        device: Where to put it.
    """
    shard = torch.empty(local_shape(placement, shape, rank), dtype=dtype, device=device)
    if shard.numel() == 0:
        return shard
    if not shape:
        return shard.copy_(handle.get_tensor(key))
    stored, index = handle.get_slice(key), local_index(placement, shape, rank)
    origin = (0,) * len(shape)
    if prod(len(ranges) for ranges in index) > _MAX_PIECES:
        # The box around all pieces is read; the pieces are then taken from it in memory.
        origin = tuple(ranges[0][0] for ranges in index)
        stored = stored[tuple(slice(ranges[0][0], ranges[-1][1]) for ranges in index)]
    for piece in itertools.product(*(_pieces(ranges) for ranges in index)):
        there = tuple(slice(a - o, b - o) for (a, b, _), o in zip(piece, origin))
        here = tuple(slice(start, start + b - a) for a, b, start in piece)
        shard[here].copy_(stored[there])
    return shard


def _pieces(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Each range as (start, stop) in the whole dimension and its start in the shard."""
    pieces, offset = [], 0
    for start, stop in ranges:
        pieces.append((start, stop, offset))
        offset += stop - start
    return pieces


def load_parameters(
    params: Mapping[str, nn.Parameter],
    keys: Mapping[str, str],
    weight_map: Mapping[str, str],
    rank: int,
    device: torch.device,
    progress: bool = False,
) -> None:
    """Give every parameter in ``keys`` its shard from the checkpoint. Goes file by file, opening each once.

    Args:
        params: Planned sharded parameters by name.
        keys: Parameter name to the key of its tensor; those not in it are left as they are.
        weight_map: Key to the file it is in.
        rank: This process's rank.
        device: Where the shards go.
        progress: Show a progress bar.
    """
    by_file: dict[str, list[str]] = {}
    for name, key in keys.items():
        by_file.setdefault(weight_map[key], []).append(name)
    total = sum(_shard_bytes(params[name], rank) for name in keys)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress)
    with bar:
        for file in sorted(by_file):
            with open_file(file) as handle:
                for name in by_file[file]:
                    param, meta = params[name], _meta_of(params[name])
                    assert meta.placement is not None
                    shard = load_shard(handle, keys[name], meta.placement, meta.shape, rank, meta.dtype, device)
                    _finish(param, meta, shard, rank, keys[name])
                    bar.update(shard.nbytes)


def load_converted(
    params: Mapping[str, nn.Parameter],
    conversions: Iterable[Conversion],
    weight_map: Mapping[str, str],
    rank: int,
    device: torch.device,
    progress: bool = False,
) -> None:
    """Give every parameter that is stored in another form its shard. One conversion at a time is held whole."""

    def read(key: str) -> torch.Tensor:
        with open_file(weight_map[key]) as handle:
            return handle.get_tensor(key)

    needed = [(c, [name for name in c.targets if name in params]) for c in conversions]
    needed = [(conversion, names) for conversion, names in needed if names]
    for conversion, names in tqdm(needed, desc="Converting weights", disable=not progress or not needed):
        whole = conversion.run(read)
        for name in names:
            meta = _meta_of(params[name])
            assert meta.placement is not None
            part = slice_box(whole.pop(name), meta.placement, rank)
            shard = torch.empty(part.shape, dtype=meta.dtype, device=device).copy_(part)
            _finish(params[name], meta, shard, rank, conversion.keys[0])


def slice_parameters(params: Mapping[str, nn.Parameter], rank: int, device: torch.device) -> None:
    """Give every parameter that came with values its shard of them, and let go of the whole."""
    for param in params.values():
        meta = _meta_of(param)
        if meta.source is None:
            continue
        assert meta.placement is not None
        part = slice_box(meta.source, meta.placement, rank)
        shard = torch.empty(part.shape, dtype=meta.dtype, device=device).copy_(part)
        del part
        meta.source = None
        _finish(param, meta, shard, rank, None)


def load_buffers(
    model: nn.Module, weight_map: Mapping[str, str], base_model_prefix: str = "", use_renamings: bool = True
) -> list[str]:
    """Load the persistent buffers that the checkpoint has, whole and in place; returns their names.

    Buffers are replicated. Those that the checkpoint lacks keep what the constructor gave them.
    """
    buffers = {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    keys = match_parameters(buffers, {}, weight_map, base_model_prefix, model if use_renamings else None)
    for name, key in keys.items():
        with open_file(weight_map[key]) as handle:
            value = handle.get_tensor(key)
        if value.shape != buffers[name].shape:
            raise CheckpointError(
                f"buffer {name}: shape {tuple(value.shape)} in the checkpoint, {tuple(buffers[name].shape)} "
                "in the model"
            )
        buffers[name].copy_(value)
    return list(keys)


def _meta_of(param: nn.Parameter) -> ParameterMeta:
    meta = parameter_meta(param)
    if meta is None or not isinstance(param, ShardedTensor):
        raise TypeError(f"expected a parameter made by `attach_parameter_meta`, got {type(param).__name__}")
    if meta.placement is None:
        raise RuntimeError(f"parameter {meta.name!r} has no placement yet, so no rank knows its part of it")
    return meta


def _shard_bytes(param: nn.Parameter, rank: int) -> int:
    meta = _meta_of(param)
    assert meta.placement is not None
    return prod(local_shape(meta.placement, meta.shape, rank)) * meta.dtype.itemsize


def _finish(param: Any, meta: ParameterMeta, shard: torch.Tensor, rank: int, source: str | None) -> None:
    materialize(param, shard)
    meta.need_initialize = False
    assert meta.placement is not None
    meta.dim = meta.placement.layouts[0][0] if isinstance(meta.placement, Shard) and meta.placement.layouts else 0
    meta.mapping = slice_mapping(meta.placement, meta.shape, rank, meta.dim, source)


def slice_mapping(
    placement: Placement, shape: tuple[int, ...], rank: int, dim: int, source: str | None
) -> dict[HashableSlice, ParameterSlice]:
    """From the slices of the shard of ``rank`` along ``dim`` to those of the whole tensor ``source``."""
    if not shape:
        return {HashableSlice(): ParameterSlice(source, None)}
    pieces = _pieces(local_index(placement, shape, rank)[dim])
    return {HashableSlice(at, at + b - a): ParameterSlice(source, slice(a, b)) for a, b, at in pieces}
