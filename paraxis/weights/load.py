"""Loading weights: each rank reads the slices of its own shards only."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ..distributed.redistribute import slice_box
from ..errors import CheckpointError
from ..placement import Placement, Ranges, Shard, local_index, local_shape
from ..tensor.parameter_meta import HashableSlice, ParameterMeta, ParameterSlice
from ..tensor.sharded_tensor import ShardedTensor, materialize
from .convert import Conversion
from .meta_init import parameter_meta
from .partial_recipes import Index
from .weight_map import DTYPES, OpenFiles, match_parameters, open_file

# A shard of more pieces than this is read together with the gaps: one large read beats many small ones.
_MAX_PIECES = 128
_MAX_THREADS = 4
_MIN_MAPPED_BYTES = 1 << 20  # smaller shards are copied instead of mapped from the file


def load_shard(
    handle: Any,
    key: str,
    placement: Placement,
    shape: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The shard that ``rank`` holds of tensor ``key`` in an open safetensors file.

    On the CPU, a shard that is contiguous in the file, in the right dtype, stays memory-mapped: ranks of one machine
    then share it through the page cache, and a write copies single pages. Every other shard gets its own memory.

    Args:
        handle: The file, from ``safetensors.safe_open``.
        key: The tensor's name in the file.
        placement: Where its elements live.
        shape: Its global shape.
        rank: Whose shard to read.
        dtype: What to convert to.
        device: Where to put it.
    """
    index = tuple(local_index(placement, shape, rank))
    mapped = _mapped(handle, key, index, shape, dtype) if device.type == "cpu" else None
    if mapped is not None:
        return mapped
    shard = torch.empty(local_shape(placement, shape, rank), dtype=dtype, device=device)
    fill_part(shard, handle, key, index)
    return shard


def _mapped(handle: Any, key: str, index: Index, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """The part ``index`` of a tensor, mapped from the file, if it is one large contiguous piece there."""
    if not index or any(ranges != ((0, size),) for ranges, size in zip(index[1:], shape[1:])) or len(index[0]) != 1:
        return None
    (start, stop) = index[0][0]
    stored = handle.get_slice(key)
    if (stop - start) * prod(shape[1:]) * dtype.itemsize < _MIN_MAPPED_BYTES or DTYPES.get(stored.get_dtype()) != dtype:
        return None
    found: torch.Tensor = stored[start:stop]
    return found if found.is_contiguous() and found.data_ptr() % dtype.itemsize == 0 else None


def fill_part(out: torch.Tensor, handle: Any, key: str, index: Index) -> None:
    """Read the part ``index`` of tensor ``key`` in an open safetensors file into ``out``."""
    if out.numel() == 0:
        return
    if not index:
        out.copy_(handle.get_tensor(key))
        return
    stored: Any = handle.get_slice(key)
    origin = (0,) * len(index)
    if prod(len(ranges) for ranges in index) > _MAX_PIECES:
        # The bounding box of all pieces is read; the pieces are then copied from it in memory.
        origin = tuple(ranges[0][0] for ranges in index)
        stored = stored[tuple(slice(ranges[0][0], ranges[-1][1]) for ranges in index)]
    for piece in itertools.product(*(_pieces(ranges) for ranges in index)):
        there = tuple(slice(a - o, b - o) for (a, b, _), o in zip(piece, origin))
        here = tuple(slice(start, start + b - a) for a, b, start in piece)
        out[here].copy_(stored[there])


def _pieces(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Each range as (start, stop) in the full dimension and its start in the shard."""
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
    """Load the shard of every parameter in ``keys`` from the checkpoint, file by file.

    Args:
        params: Planned sharded parameters by name.
        keys: Parameter name to the key of its tensor; other parameters do not change.
        weight_map: Key to the file it is in.
        rank: This process's rank.
        device: Where the shards go.
        progress: Show a progress bar.
    """
    total = sum(_shard_bytes(params[name], rank) for name in keys)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=None if progress else True)

    def load(name: str) -> int:
        param, meta = params[name], _meta_of(params[name])
        placement, mine = storage_placement(meta, rank)
        handle = files[weight_map[keys[name]]]
        shard = load_shard(handle, keys[name], placement, meta.shape, mine, meta.dtype, device)
        _finish(param, meta, shard, rank, keys[name])
        return shard.nbytes

    with bar, OpenFiles() as files, _workers() as each:
        for size in each(load, sorted(keys, key=lambda name: weight_map[keys[name]])):
            bar.update(size)


@contextmanager
def _workers() -> Iterator[Callable[..., Iterable[int]]]:
    """A ``map`` over a thread per core of this rank, up to ``_MAX_THREADS``: while one waits for a file, or for a copy
    to a device, another reads. Values are copied from mapped files directly into the shards, so that threads take no
    memory."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(_MAX_THREADS, cores // ranks)
    if count <= 1:
        yield map
        return
    with ThreadPoolExecutor(count, thread_name_prefix="paraxis-load") as pool:
        yield pool.map


def load_converted(
    params: Mapping[str, nn.Parameter],
    conversions: Iterable[Conversion],
    weight_map: Mapping[str, str],
    rank: int,
    device: torch.device,
    progress: bool = False,
) -> None:
    """Load the shards of parameters that are stored in another form, reading only the tensors that they need."""
    needed = [(conversion, name) for conversion in conversions for name in conversion.targets if name in params]
    with OpenFiles() as files:

        def fill(out: torch.Tensor, key: str, index: Index) -> None:
            fill_part(out, files[weight_map[key]], key, index)

        for conversion, name in tqdm(needed, desc="Converting weights", disable=None if progress and needed else True):
            meta = _meta_of(params[name])
            placement, mine = storage_placement(meta, rank)
            shard = torch.empty(local_shape(placement, meta.shape, mine), dtype=meta.dtype, device=device)
            conversion.fill(shard, name, tuple(local_index(placement, meta.shape, mine)), fill)
            _finish(params[name], meta, shard, rank, conversion.keys[0])


def slice_parameters(params: Mapping[str, nn.Parameter], rank: int, device: torch.device) -> None:
    """Slice the shard of every parameter that came with values, and free the full tensor."""
    for param in params.values():
        meta = _meta_of(param)
        if meta.source is None:
            continue
        part = slice_box(meta.source, *storage_placement(meta, rank))
        shard = torch.empty(part.shape, dtype=meta.dtype, device=device).copy_(part)
        del part
        meta.source = None
        _finish(param, meta, shard, rank, None)


def load_buffers(
    model: nn.Module, weight_map: Mapping[str, str], base_model_prefix: str = "", use_renamings: bool = True
) -> list[str]:
    """Load the persistent buffers that the checkpoint has, in place; returns their names.

    Buffers are replicated. Those that the checkpoint lacks have the values of the constructor.
    """
    buffers = {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    if not buffers:
        return []
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
        raise RuntimeError(f"parameter {meta.name!r} has no placement yet, so its shards are unknown")
    return meta


def _shard_bytes(param: nn.Parameter, rank: int) -> int:
    meta = _meta_of(param)
    placement, mine = storage_placement(meta, rank)
    return prod(local_shape(placement, meta.shape, mine)) * meta.dtype.itemsize


def storage_placement(meta: ParameterMeta, rank: int) -> tuple[Placement, int]:
    """The placement of a parameter over all ranks that store different elements, and this rank among them.

    These are the tensor-parallel ranks, of which this is ``rank``, or all ranks of the mesh with FSDP.
    """
    assert meta.placement is not None
    return (meta.placement, rank) if meta.dp_shard is None else (meta.dp_shard.mesh_placement, meta.dp_shard.rank)


def _finish(param: Any, meta: ParameterMeta, shard: torch.Tensor, rank: int, source: str | None) -> None:
    """Set the shard of a parameter, and update its metadata."""
    materialize(param, shard)
    meta.need_initialize = False
    placement, mine = storage_placement(meta, rank)
    meta.dim = placement.layouts[0][0] if isinstance(placement, Shard) and placement.layouts else 0
    meta.mapping = slice_mapping(placement, meta.shape, mine, meta.dim, source)


def slice_mapping(
    placement: Placement, shape: tuple[int, ...], rank: int, dim: int, source: str | None
) -> dict[HashableSlice, ParameterSlice]:
    """From slices of the shard of ``rank`` along ``dim`` to slices of the full tensor ``source``."""
    if not shape:
        return {HashableSlice(): ParameterSlice(source, None)}
    pieces = _pieces(local_index(placement, shape, rank)[dim])
    return {HashableSlice(at, at + b - a): ParameterSlice(source, slice(a, b)) for a, b, at in pieces}
