"""Reading weights: each rank reads its own slices, and nothing else."""

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

# A box of more pieces than this is read with what lies between them: one large read beats many small ones.
_MAX_PIECES = 128
_MOST_THREADS = 4
_MAPPED = 1 << 20  # bytes of the smallest shard that is left in the file


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

    On the CPU, a shard that lies in the file in one piece, and as it is to be, stays mapped: ranks of one machine then
    share it with the system's cache of the file, and it is copied, page by page, where it is written to. Every other
    shard gets memory of its own.

    Args:
        handle: The file, as given by ``safetensors.safe_open``.
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
    """The part of a tensor that ``index`` says, where it is in the file, if it is one large piece there."""
    if not index or any(ranges != ((0, size),) for ranges, size in zip(index[1:], shape[1:])) or len(index[0]) != 1:
        return None
    (start, stop) = index[0][0]
    stored = handle.get_slice(key)
    if (stop - start) * prod(shape[1:]) * dtype.itemsize < _MAPPED or DTYPES.get(stored.get_dtype()) != dtype:
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
        # The box around all pieces is read; the pieces are then taken from it in memory.
        origin = tuple(ranges[0][0] for ranges in index)
        stored = stored[tuple(slice(ranges[0][0], ranges[-1][1]) for ranges in index)]
    for piece in itertools.product(*(_pieces(ranges) for ranges in index)):
        there = tuple(slice(a - o, b - o) for (a, b, _), o in zip(piece, origin))
        here = tuple(slice(start, start + b - a) for a, b, start in piece)
        out[here].copy_(stored[there])


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
    """Give every parameter in ``keys`` its shard from the checkpoint, file by file.

    Args:
        params: Planned sharded parameters by name.
        keys: Parameter name to the key of its tensor; those not in it are left as they are.
        weight_map: Key to the file it is in.
        rank: This process's rank.
        device: Where the shards go.
        progress: Show a progress bar.
    """
    total = sum(_shard_bytes(params[name], rank) for name in keys)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=None if progress else True)

    def load(name: str) -> int:
        param, meta = params[name], _meta_of(params[name])
        placement, mine = held(meta, rank)
        handle = files[weight_map[keys[name]]]
        shard = load_shard(handle, keys[name], placement, meta.shape, mine, meta.dtype, device)
        _finish(param, meta, shard, rank, keys[name])
        return shard.nbytes

    with bar, OpenFiles() as files, _workers() as each:
        for size in each(load, sorted(keys, key=lambda name: weight_map[keys[name]])):
            bar.update(size)


@contextmanager
def _workers() -> Iterator[Callable[..., Iterable[int]]]:
    """A ``map`` over as many threads as this rank has cores, and no more than a few: while one waits for a file, or for
    a copy to a device, another reads. Values are read from mapped files straight to where they belong, so that threads
    take no memory."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(_MOST_THREADS, cores // ranks)
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
    """Give every parameter that is stored in another form its shard, reading only what the shard is made of."""
    needed = [(conversion, name) for conversion in conversions for name in conversion.targets if name in params]
    with OpenFiles() as files:

        def fill(out: torch.Tensor, key: str, index: Index) -> None:
            fill_part(out, files[weight_map[key]], key, index)

        for conversion, name in tqdm(needed, desc="Converting weights", disable=None if progress and needed else True):
            meta = _meta_of(params[name])
            placement, mine = held(meta, rank)
            shard = torch.empty(local_shape(placement, meta.shape, mine), dtype=meta.dtype, device=device)
            conversion.fill(shard, name, tuple(local_index(placement, meta.shape, mine)), fill)
            _finish(params[name], meta, shard, rank, conversion.keys[0])


def slice_parameters(params: Mapping[str, nn.Parameter], rank: int, device: torch.device) -> None:
    """Give every parameter that came with values its shard of them, and let go of the whole."""
    for param in params.values():
        meta = _meta_of(param)
        if meta.source is None:
            continue
        part = slice_box(meta.source, *held(meta, rank))
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
        raise RuntimeError(f"parameter {meta.name!r} has no placement yet, so no rank knows its part of it")
    return meta


def _shard_bytes(param: nn.Parameter, rank: int) -> int:
    meta = _meta_of(param)
    placement, mine = held(meta, rank)
    return prod(local_shape(placement, meta.shape, mine)) * meta.dtype.itemsize


def held(meta: ParameterMeta, rank: int) -> tuple[Placement, int]:
    """Where the elements of a parameter are kept, and which of the ranks there this is; ``rank`` is the one of tp."""
    assert meta.placement is not None
    return (meta.placement, rank) if meta.dp_shard is None else (meta.dp_shard.mesh_placement, meta.dp_shard.rank)


def _finish(param: Any, meta: ParameterMeta, shard: torch.Tensor, rank: int, source: str | None) -> None:
    materialize(param, shard)
    meta.need_initialize = False
    placement, mine = held(meta, rank)
    meta.dim = placement.layouts[0][0] if isinstance(placement, Shard) and placement.layouts else 0
    meta.mapping = slice_mapping(placement, meta.shape, mine, meta.dim, source)


def slice_mapping(
    placement: Placement, shape: tuple[int, ...], rank: int, dim: int, source: str | None
) -> dict[HashableSlice, ParameterSlice]:
    """From the slices of the shard of ``rank`` along ``dim`` to those of the whole tensor ``source``."""
    if not shape:
        return {HashableSlice(): ParameterSlice(source, None)}
    pieces = _pieces(local_index(placement, shape, rank)[dim])
    return {HashableSlice(at, at + b - a): ParameterSlice(source, slice(a, b)) for a, b, at in pieces}
