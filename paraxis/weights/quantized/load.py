"""Loading quantized parameters: each rank reads its slices of every tensor that they consist of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ...errors import CheckpointError
from ...placement import Placement, Ranges, local_index, local_shape
from ...tensor.parameter_meta import ParameterMeta
from ...tensor.quantized import QuantizedWeight
from ..load import _finish
from ..weight_map import OpenFiles
from .format import Index, covering, elements
from .pieces import Composition
from .stored import Stored, reader

Tensors = dict[str, torch.Tensor]


def load_quantized(
    params: Mapping[str, nn.Parameter],
    weight_map: Mapping[str, str],
    rank: int,
    device: torch.device,
    progress: bool = False,
) -> None:
    """Load the shard of every quantized parameter: first all scales, which are checked, then the values.

    Raises:
        CheckpointError: a placement that the format cannot have, or a scale that is no number, or zero.
    """
    parts: dict[str, Tensors] = {}
    with OpenFiles() as files:
        problems: list[str] = []
        for name, parameter in params.items():
            meta: ParameterMeta = parameter.spec  # type: ignore[attr-defined]
            assert meta.quantized is not None and meta.placement is not None
            problem = meta.quantized.problems(meta.placement)
            if not problem:
                small = [part for part in meta.quantized.parts if part != "codes"]
                parts[name] = _load(meta.quantized, meta.placement, rank, weight_map, files, small)
                problem = _bad_values(meta.quantized, parts[name])
            if problem:
                problems.append(f"{name} ({meta.quantized.format}, {meta.shape}): {problem}")
        if problems:
            lines = "\n".join(f"  - {line}" for line in problems[:12])
            raise CheckpointError(f"the checkpoint has quantized weights that cannot be used:\n{lines}")
        for name, parameter in tqdm(params.items(), "Loading weights", disable=None if progress and params else True):
            meta = parameter.spec  # type: ignore[attr-defined]
            assert meta.quantized is not None and meta.placement is not None
            tensors = parts.pop(name) | _load(meta.quantized, meta.placement, rank, weight_map, files, ["codes"])
            moved = {part: tensor.to(device) for part, tensor in tensors.items()}
            shard = meta.quantized.assemble(moved, meta.placement, rank, meta.dtype)
            _finish(parameter, meta, shard, rank, meta.quantized.source.first.key)


def load_quantizing(
    params: Mapping[str, nn.Parameter], dense: Callable[[str, Index], torch.Tensor], rank: int, device: torch.device
) -> None:
    """Quantize the shard of every parameter, with the result that quantizing the full parameter would have.

    ``dense(name, index)``: a box of a parameter that is not quantized yet. It contains the blocks that are cut.
    """
    for name, parameter in params.items():
        meta: ParameterMeta = parameter.spec  # type: ignore[attr-defined]
        assert meta.quantized is not None and meta.placement is not None
        problem = meta.quantized.problems(meta.placement)
        if problem:
            raise CheckpointError(f"{name} ({meta.quantized.format}, {meta.shape}): {problem}")
        tensors = _quantize(name, meta.quantized, meta.placement, rank, dense)
        moved = {part: tensor.to(device) for part, tensor in tensors.items()}
        shard = meta.quantized.assemble(moved, meta.placement, rank, meta.dtype)
        _finish(parameter, meta, shard, rank, None)


def _quantize(
    name: str, weight: QuantizedWeight, placement: Placement, rank: int, dense: Callable[[str, Index], torch.Tensor]
) -> Tensors:
    format = weight.source.first.format
    index = local_index(placement, weight.shape, rank)
    dims = (weight.row_dim, weight.column_dim)
    units = [min(unit, weight.shape[dim]) for unit, dim in zip(format.units(), dims, strict=True)]
    outer = {dim: _outer(index[dim], unit, weight.shape[dim]) for dim, unit in zip(dims, units, strict=True)}
    box = tuple(outer.get(dim, ranges) for dim, ranges in enumerate(index))
    where = weight.placements(placement)
    shapes = {part: tuple(local_shape(where[part], weight.parts[part].shape, rank)) for part in weight.parts}
    if any(not ranges for ranges in index):
        return {part: torch.empty(shape, dtype=weight.parts[part].dtype) for part, shape in shapes.items()}
    values = dense(name, box)
    values = values.transpose(-1, -2) if weight.transposed else values
    tensors = format.quantize(values)
    shape = tuple(values.shape)

    def read(suffix: str, wanted: Index | None) -> torch.Tensor:
        tensor = tensors[suffix]
        for dim, ranges in enumerate(wanted or ()):
            tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in ranges], dim)
        return tensor

    found = {}
    for part, form in weight.parts.items():
        inside = []
        for axis, ranges in zip(form.axes, local_index(where[part], form.shape, rank), strict=True):
            held = outer.get(axis.dim) if axis.dim is not None else None
            blocks = tuple((a // axis.block, -(-b // axis.block)) for a, b in held) if held is not None else ranges
            inside.append(_positions(blocks, ranges))
        found[part] = format.load(part, tuple(inside), read, shape).contiguous()
    return found


def _outer(ranges: Ranges, unit: int, size: int) -> Ranges:
    """The ranges, widened to multiples of a unit."""
    units, _ = covering(ranges, unit, size)
    return elements(units, unit, size)


def _positions(outer: Ranges, inner: Ranges) -> Ranges:
    """Where ranges are, among the indices of ranges that contain them."""
    found, before = [], 0
    for start, stop in outer:
        found += [
            (before + max(a, start) - start, before + min(b, stop) - start)
            for a, b in inner
            if max(a, start) < min(b, stop)
        ]
        before += stop - start
    return tuple(found)


def _load(
    weight: QuantizedWeight,
    placement: Placement,
    rank: int,
    weight_map: Mapping[str, str],
    files: Any,
    names: list[str],
) -> Tensors:
    """This rank's slices of some parts of a parameter."""
    where = weight.placements(placement)
    found = {}
    for name in names:
        part = weight.parts[name]
        index = local_index(where[name], part.shape, rank)
        shape = tuple(local_shape(where[name], part.shape, rank))
        found[name] = _load_part(weight.source, name, weight, index, shape, weight_map, files)
    return found


def _load_part(
    composition: Composition,
    name: str,
    weight: QuantizedWeight,
    index: list[Ranges],
    shape: tuple[int, ...],
    weight_map: Mapping[str, str],
    files: Any,
) -> torch.Tensor:
    part = weight.parts[name]

    def load(stored: Stored, box: tuple[Ranges, ...]) -> torch.Tensor:
        return stored.format.load(name, box, reader(stored, weight_map, files), stored.shape)

    if 0 in shape:
        return torch.empty(shape, dtype=part.dtype)
    one = not composition.stacked and len(composition.stack[0]) == 1
    if name == "columns":
        return load(composition.first, tuple(index)).contiguous()
    if one and composition.stack[0][0].length == composition.first.shape[-2]:
        return load(composition.first, tuple(index)).contiguous()
    out = torch.empty(shape, dtype=part.dtype)
    target = out if composition.stacked else out.unsqueeze(0)
    rows_axis = part.axes[-2]
    which = index[0] if composition.stacked else ((0, 1),)
    for box in composition.boxes(which, index[-2], rows_axis.block):
        target[box.at].narrow(0, box.out_start, box.length).copy_(load(box.stored, (box.rows, index[-1])))
    return out


def _bad_values(weight: QuantizedWeight, parts: Tensors) -> str:
    """What is wrong with scales and indices that were read; empty if nothing is."""
    scales = parts["scales"]
    if weight.encoding.exponents:
        return "scales have NaN" if bool((scales == 255).any()) else ""
    values = scales.to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        return "scales have NaN or infinity"
    if not weight.source.first.format.zero_scales and bool((values == 0).any()):
        return "a scale is zero"
    columns = parts.get("columns")
    if columns is not None and columns.numel():
        groups = weight.parts["scales"].shape[-1]
        low, high = int(columns.min()), int(columns.max())
        if low < 0 or high >= groups:
            return f"the index of groups has {low if low < 0 else high}, and there are {groups} groups"
    return ""
