"""Loading quantized parameters: each rank reads its slices of every tensor that they consist of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from ...errors import CheckpointError
from ...placement import Placement, Ranges, local_index, local_shape
from ...placement.blocks import Axis
from ...tensor.parameter_meta import ParameterMeta
from ...tensor.quantized import QuantizedWeight
from ..load import _finish
from ..weight_map import OpenFiles
from .format import Index, covering, elements
from .pieces import Composition
from .stored import Stored, read_box, reader

Tensors = dict[str, torch.Tensor]
Dense = Callable[[str, Stored, Index], torch.Tensor]
"""From a parameter, one of its weights and a box of it to values that are not quantized."""


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
    params: Mapping[str, nn.Parameter], dense: Dense, rank: int, device: torch.device, progress: bool = False
) -> None:
    """Quantize the shard of every parameter, with the result that quantizing the full weights would have.

    ``dense(name, stored, index)``: a box of a weight of a parameter that is not quantized yet. It contains the blocks
    that are cut.

    Raises:
        CheckpointError: a placement that the format cannot have, or a value that is no number.
    """
    for name, parameter in tqdm(params.items(), "Quantizing weights", disable=None if progress and params else True):
        meta: ParameterMeta = parameter.spec  # type: ignore[attr-defined]
        assert meta.quantized is not None and meta.placement is not None
        problem = meta.quantized.problems(meta.placement)
        if problem:
            raise CheckpointError(f"{name} ({meta.quantized.format}, {meta.shape}): {problem}")
        tensors = _quantize(name, meta.quantized, meta.placement, rank, dense)
        moved = {part: tensor.to(device) for part, tensor in tensors.items()}
        shard = meta.quantized.assemble(moved, meta.placement, rank, meta.dtype)
        _finish(parameter, meta, shard, rank, None)


def quantize_from_files(
    params: Mapping[str, nn.Parameter],
    weight_map: Mapping[str, str],
    rank: int,
    device: torch.device,
    progress: bool = False,
) -> None:
    """Quantize the shard of every parameter from slices of a plain checkpoint."""
    with OpenFiles() as files:

        def dense(name: str, stored: Stored, index: Index) -> torch.Tensor:
            found = read_box(files[weight_map[stored.key]], stored.key, index)
            return found.to(params[name].spec.dtype)  # type: ignore[attr-defined]

        load_quantizing(params, dense, rank, device, progress)


class _Quantized(NamedTuple):
    """A box of a stored weight, quantized: its tensors, and where its rows and columns are."""

    tensors: Tensors
    rows: Ranges
    columns: Ranges
    shape: tuple[int, ...]


def _quantize(name: str, weight: QuantizedWeight, placement: Placement, rank: int, dense: Dense) -> Tensors:
    """The parts of a shard: of every stored weight that it has rows of, the blocks that these are in."""
    composition: Composition = weight.source
    index = local_index(placement, weight.shape, rank)
    where = weight.placements(placement)
    quantized: dict[Stored, _Quantized] = {}

    def boxed(stored: Stored) -> _Quantized:
        if stored not in quantized:
            rows, columns = _needed(composition, stored, index[weight.row_dim]), index[weight.column_dim]
            shape, units = stored.shape, stored.format.units()
            outer = (_outer(rows, units[0], shape[-2]), _outer(columns, units[1], shape[-1]))
            stack = tuple(index[: len(shape) - 2])
            values = dense(name, stored, (*stack, *outer))
            if not bool(torch.isfinite(values).all()):
                raise CheckpointError(f"{name} ({weight.format}): values with NaN or infinity cannot be quantized")
            quantized[stored] = _Quantized(stored.format.quantize(values), *outer, tuple(values.shape))
        return quantized[stored]

    found = {}
    for part, form in weight.parts.items():
        axes = form.axes[-2:]

        def load(stored: Stored, box: Index, part: str = part, axes: tuple[Axis, ...] = axes) -> torch.Tensor:
            held = boxed(stored)

            def read(suffix: str, wanted: Index | None) -> torch.Tensor:
                tensor = held.tensors[suffix]
                for dim, ranges in enumerate(wanted or ()):
                    tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in ranges], dim)
                return tensor

            inside = []
            for axis, outer, ranges in zip(axes, (held.rows, held.columns), box[-2:], strict=True):
                blocks = tuple((a // axis.block, -(-b // axis.block)) for a, b in outer)
                inside.append(ranges if axis.dim is None else _positions(blocks, ranges))
            stack = tuple(((0, size),) for size in held.shape[:-2])
            return stored.format.load(part, (*stack, *inside), read, held.shape)

        shape = tuple(local_shape(where[part], form.shape, rank))
        found[part] = _compose(composition, part, weight, local_index(where[part], form.shape, rank), shape, load)
    return found


def _needed(composition: Composition, stored: Stored, rows: Ranges) -> Ranges:
    """The rows of a stored weight that some rows of a parameter consist of."""
    pieces = [pieces for pieces in composition.stack if any(piece.stored is stored for piece in pieces)]
    found: list[tuple[int, int]] = []
    at = 0
    for piece in pieces[0]:
        if piece.stored is stored:
            shift = piece.start - at
            found += [
                (max(a, at) + shift, min(b, at + piece.length) + shift)
                for a, b in rows
                if max(a, at) < min(b, at + piece.length)
            ]
        at += piece.length
    return tuple(sorted(found))


def _outer(ranges: Ranges, unit: int, size: int) -> Ranges:
    """The ranges, widened to multiples of a unit."""
    unit = min(unit, size)
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

        def load(stored: Stored, box: Index, name: str = name) -> torch.Tensor:
            return stored.format.load(name, box, reader(stored, weight_map, files), stored.shape)

        found[name] = _compose(weight.source, name, weight, index, shape, load)
    return found


def _compose(
    composition: Composition,
    name: str,
    weight: QuantizedWeight,
    index: list[Ranges],
    shape: tuple[int, ...],
    load: Callable[[Stored, Index], torch.Tensor],
) -> torch.Tensor:
    """A part of a shard, read box by box from the stored weights that the parameter consists of."""
    part = weight.parts[name]
    if 0 in shape:
        return torch.empty(shape, dtype=part.dtype)
    one = not composition.stacked and len(composition.stack[0]) == 1
    if name == "columns":
        found = load(composition.first, tuple(index)).contiguous()
        for other in composition.stored[1:]:
            if not torch.equal(load(other, tuple(index)), found):
                raise CheckpointError(
                    f"{other.key} ({other.format.name}): its index of groups (act-order) is not that of "
                    f"{composition.first.key}, with which it is one parameter; that is not supported"
                )
        return found
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
