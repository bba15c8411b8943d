"""The one place where parameters get their placements."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from ..placement import REPLICATE, Partial, Placement, Shard
from .parameter_meta import ParameterMeta


def apply_placements(placements: Iterable[tuple[ParameterMeta, Placement]], group: dist.ProcessGroup) -> None:
    """Place parameters. One that has a placement already keeps it: its shard may be loaded."""
    for meta, placement in placements:
        if meta.placement is not None:
            continue
        meta.placement, meta.group = placement, group
        meta.is_modified_meta, meta.is_parallel = True, isinstance(placement, Shard)
        if isinstance(placement, Shard) and placement.layouts:
            meta.dim = placement.layouts[0][0]


def stored(placement: Placement) -> Placement:
    """How a parameter is stored that a program uses in a placement: replicated, unless it is really sharded."""
    shared = isinstance(placement, Shard) and not placement.layouts
    return REPLICATE if isinstance(placement, Partial) or shared else placement
