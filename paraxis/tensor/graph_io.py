"""Where sharded tensors enter and leave a local program: :func:`unwrap` takes the shard out, these put it back.

They are plain functions with plain arguments (a placement is text, a group its name), so that a printed program shows
them and passes find them by identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..compat.distributed import resolve_process_group
from ..distributed.operators import decode
from ..distributed.redistribute import slice_box
from ..placement import Shard
from .sharded_tensor import ShardSpec, wrap

_specs: dict[tuple[str, tuple[int, ...], str], tuple[ShardSpec, list[tuple[int, int, int, int]]]] = {}
"""By the arguments of :func:`wrap_shard`: the specification, and of every sharded dimension what its global size
follows from. A group may be made anew under an old name, so the entry is checked against the group."""


def wrap_shard(local: torch.Tensor, placement: str, shape: tuple[int, ...], group: str) -> torch.Tensor:
    """A result that leaves the program sharded. ``shape`` is the global one, with -1 for dynamic sizes."""
    spec, sharded = _found(placement, shape, group)
    return wrap(local, spec, _global_size(local.shape, sharded))


def wrap_shards(results: list[Any], wrappers: dict[tuple[str, tuple[int, ...], str], list[int]]) -> None:
    """:func:`wrap_shard` for the results at several positions, by its other arguments: a prefill returns two tensors
    per layer, most of them of one shape."""
    for arguments, positions in wrappers.items():
        spec, sharded = _found(*arguments)
        sizes: dict[Any, list[int]] = {}
        for i in positions:
            local = results[i]
            size = sizes.get(local.shape)
            if size is None:
                size = sizes[local.shape] = _global_size(local.shape, sharded)
            results[i] = wrap(local, spec, size)


def _found(placement: str, shape: tuple[int, ...], group: str) -> tuple[ShardSpec, list[tuple[int, int, int, int]]]:
    ranks: Any = resolve_process_group(group)
    found = _specs.get((placement, shape, group))
    if found is None or found[0].group is not ranks:
        found = _specs[placement, shape, group] = _spec_of(placement, shape, ranks)
    return found


def _global_size(local: Sequence[int], sharded: list[tuple[int, int, int, int]]) -> list[int]:
    """The global sizes of a shard with these sizes."""
    size = list(local)
    for dim, full, period, held in sharded:
        size[dim] = full if full != -1 else size[dim] * period // held
    return size


def _spec_of(
    text: str, shape: tuple[int, ...], ranks: dist.ProcessGroup
) -> tuple[ShardSpec, list[tuple[int, int, int, int]]]:
    placement, rank = decode(text), ranks.rank()
    assert isinstance(placement, Shard)
    sharded = [(d, shape[d], x.period, x.local_size(x.period, rank)) for d, x in placement.layouts]
    return ShardSpec(placement, ranks), sharded


def write_shard(local: torch.Tensor, full: torch.Tensor, placement: str, group: str) -> torch.Tensor:
    """Write this rank's part of a full tensor into the shard of an input, such as a KV cache of a fixed size."""
    ranks: Any = resolve_process_group(group)
    return local.copy_(slice_box(full, decode(placement), ranks.rank()))
