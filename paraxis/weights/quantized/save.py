"""Writing quantized parameters back: the tensors of the checkpoint, bit by bit as they were read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...distributed.redistribute import gather_box
from ...errors import CheckpointError
from ...tensor.parameter_meta import ParameterMeta
from ...tensor.quantized import QuantizedTensor, QuantizedWeight
from ...tensor.sharded_tensor import ShardedTensor
from ..weight_map import open_file
from .pieces import Composition
from .stored import Stored

State = dict[str, torch.Tensor]


def is_quantized(value: Any) -> bool:
    """Whether a tensor is a quantized parameter."""
    return (
        isinstance(value, ShardedTensor) and isinstance(value.spec, ParameterMeta) and value.spec.quantized is not None
    )


def stored_tensors(name: str, value: ShardedTensor) -> State:
    """Meta tensors of what is stored for a quantized parameter, by key.

    Raises:
        CheckpointError: the parameter has only a part of a stored weight: the others are in another parameter.
    """
    weight = _weight(value)
    found: State = {}
    for stored in weight.source.stored:
        if sum(p.length for pieces in weight.source.stack for p in pieces if p.stored is stored) != stored.shape[-2]:
            raise CheckpointError(
                f"{name}: the checkpoint stores it together with other parameters, and cannot be written from it alone"
            )
        for suffix, header in stored.headers.items():
            found[key_of(stored, suffix)] = header
    return found


def file_metadata(files: Iterable[str]) -> dict[str, str]:
    """What the headers of a checkpoint's files say besides their tensors: some formats describe tensors there."""
    found: dict[str, str] = {}
    for path in dict.fromkeys(files):
        if os.path.exists(path):
            with open_file(path) as handle:
                found |= handle.metadata() or {}
    return found


def key_of(stored: Stored, suffix: str) -> str:
    """The key of a tensor in the checkpoint."""
    found = stored.keys.get(suffix)
    return found if found is not None else stored.key.removesuffix(stored.format.weight) + suffix


def gather_parts(value: ShardedTensor) -> State:
    """The full parts of a quantized parameter, on every rank. A collective."""
    weight, local = _weight(value), value.local
    assert isinstance(local, QuantizedTensor)
    where = weight.placements(value.placement)
    found: State = {}
    for name, part in weight.parts.items():
        tensor = getattr(local.parts, name)
        raw = tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.contiguous()
        found[name] = gather_box(raw, where[name], part.shape, value.group).view(part.dtype)
    return found


def stored_state(value: ShardedTensor, parts: Mapping[str, torch.Tensor]) -> State:
    """What is stored for a quantized parameter, by key, from its full parts."""
    weight = _weight(value)
    composition: Composition = weight.source
    found: State = {}
    for stored in composition.stored:
        tensors = stored.format.store(_parts_of(stored, weight, composition, parts), stored.shape, stored.constants)
        for suffix, tensor in {**tensors, **stored.constants}.items():
            found[key_of(stored, suffix)] = tensor.reshape(stored.headers[suffix].shape).contiguous()
    return found


def _parts_of(
    stored: Stored, weight: QuantizedWeight, composition: Composition, parts: Mapping[str, torch.Tensor]
) -> State:
    """The parts of one of the stored weights that a parameter consists of."""
    if not composition.stacked and len(composition.stored) == 1 and len(composition.stack[0]) == 1:
        return dict(parts)
    found: State = {}
    for name, tensor in parts.items():
        if name == "columns":  # all weights have the same, and files have no tensors that share memory
            found[name] = tensor.clone()
            continue
        axis = weight.parts[name].axes[-2]

        pieces: list[tuple[int, torch.Tensor]] = []
        for i, several in enumerate(composition.stack):
            own = tensor[i] if composition.stacked else tensor
            first = 0
            for piece in several:
                begin = piece.start // axis.block
                count = -(-(piece.start + piece.length) // axis.block) - begin
                if piece.stored is stored:
                    pieces.append((piece.start, own.narrow(0, first, count)))
                first += count
        found[name] = _joined(pieces, axis.block)
    return found


def _joined(pieces: list[tuple[int, torch.Tensor]], block: int) -> torch.Tensor:
    """The rows of a part from pieces that begin at these rows of the weight; two may share a block."""
    last, tensors = 0, []
    for start, tensor in sorted(pieces, key=lambda piece: piece[0]):
        begin = start // block
        tensors.append(tensor[max(last - begin, 0) :])
        last = max(last, begin + tensor.shape[0])
    return torch.cat(tensors)


def _weight(value: ShardedTensor) -> QuantizedWeight:
    assert isinstance(value.spec, ParameterMeta) and value.spec.quantized is not None
    return value.spec.quantized
