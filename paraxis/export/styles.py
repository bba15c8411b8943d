"""The ways to split a module that other libraries have, and what each of them does to a rank.

The libraries name them differently; here they are called by what they do:

====================  ==========================================================================================
``column``            A Linear's weight by outputs; the result stays split.
``column-gathered``   The same, and the result is gathered: exact whatever comes after.
``column-packed``     A Linear whose outputs are two halves (``[gate|up]``): each half by itself; stays split.
``row``               A Linear's weight by inputs, from an input that is split; the results are summed.
``row-split``         The same from a whole input, of which each rank takes its part: exact whatever came before.
``vocab``             An Embedding's table by rows; the results are summed.
``experts``           A module that holds its weights as parameters of its own, each cut; its results are summed.
``cut:D:S``           Such a parameter, cut along dimension ``D`` (negative), in ``S`` segments each by itself.
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
"""Which module (or parameter), with its block numbers left open, is split in which way."""


def cut_style(dim: int, segments: int) -> str:
    """The way of a parameter that is cut along ``dim``, in so many segments each by itself."""
    return f"cut:{dim}:{segments}"


def parse_cut(style: str) -> tuple[int, int] | None:
    """(dimension, segments) of a parameter's way, and None for a module's."""
    if not style.startswith("cut:"):
        return None
    _, dim, segments = style.split(":")
    return int(dim), int(segments)


def cut(tensor: Tensor, dim: int, segments: int, rank: int, world: int) -> Tensor:
    """The part of a tensor that a rank holds: of each segment its share, in order."""
    parts = tensor.chunk(segments, dim)
    if any(part.shape[dim] % world for part in parts) or len({part.shape for part in parts}) != 1:
        raise ValueError(f"{tuple(tensor.shape)} cannot be cut evenly along {dim} for {world} ranks")
    return torch.cat([part.chunk(world, dim)[rank] for part in parts], dim)
