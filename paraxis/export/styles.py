"""The parallel styles that other libraries have, and what each does on a rank.

The libraries name them differently. Here they are called:

====================  ==========================================================================================
``column``            A Linear with its weight sharded on the outputs; the output stays sharded.
``column-gathered``   The same, with an all-gather of the output: exact whatever follows.
``column-packed``     A Linear whose outputs are two halves (``[gate|up]``), each sharded; the output stays sharded.
``row``               A Linear with its weight sharded on the inputs, from a sharded input; all-reduces the output.
``row-split``         The same from a replicated input, of which each rank takes its shard: exact whatever precedes.
``vocab``             An Embedding with its table sharded on the rows; all-reduces the output.
``experts``           A module with parameters of its own, each sharded; all-reduces the output.
``shard:D:S``         Such a parameter, sharded on dimension ``D`` (negative), in ``S`` segments each.
====================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

COLUMN, GATHERED, PACKED = "column", "column-gathered", "column-packed"
ROW, ROW_SPLIT = "row", "row-split"
VOCAB, EXPERTS = "vocab", "experts"

Assignment = Mapping[str, str]
"""The style of every sharded module or parameter, by its name with ``*`` for block numbers."""


def parameter_style(dim: int, segments: int) -> str:
    """The style of a parameter that is sharded on ``dim``, in ``segments`` segments each."""
    return f"shard:{dim}:{segments}"


def parse_parameter_style(style: str) -> tuple[int, int] | None:
    """(dimension, segments) of the style of a parameter; None for the style of a module."""
    if not style.startswith("shard:"):
        return None
    _, dim, segments = style.split(":")
    return int(dim), int(segments)


def shard_of(tensor: Tensor, dim: int, segments: int, rank: int, world: int) -> Tensor:
    """The shard of a tensor on a rank: its shard of every segment, concatenated."""
    parts = tensor.chunk(segments, dim)
    if any(part.shape[dim] % world for part in parts) or len({part.shape for part in parts}) != 1:
        raise ValueError(f"{tuple(tensor.shape)} cannot be sharded evenly on dimension {dim} over {world} ranks")
    return torch.cat([part.chunk(world, dim)[rank] for part in parts], dim)
