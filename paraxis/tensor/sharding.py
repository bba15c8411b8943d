"""Where the elements of a sharded tensor live, and the way between the full tensor and the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..compat.torch import current_graph_task
from ..distributed.dp_shard import DPShard
from ..distributed.redistribute import gather_box, slice_box
from ..placement import Placement

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor


class ShardSpec:
    """The placement of an activation or a cache tensor, compared by value: compiled code is guarded on it."""

    def __init__(self, placement: Placement, group: dist.ProcessGroup | None, dp_shard: DPShard | None = None) -> None:
        self.placement = placement
        self.group = group
        self.dp_shard = dp_shard
        """How data-parallel ranks divide the shard further: gradients and the optimizer's state have it."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardSpec)
            and other.placement == self.placement
            and other.group is self.group
            and other.dp_shard == self.dp_shard
        )

    def __hash__(self) -> int:
        return hash(self.placement)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        return self


def spec_of(tensor: ShardedTensor) -> ShardSpec:
    """A new spec with the placement of ``tensor``, for another tensor that is sharded the same way."""
    return ShardSpec(tensor.placement, tensor._spec.group, tensor.dp_shard)


def full_tensor_of(tensor: ShardedTensor) -> torch.Tensor:
    """The full tensor; this rank's own memory if that is all of it. A collective."""
    local = tensor._local if tensor.dp_shard is None else tensor.dp_shard.unshard(tensor._local)
    return gather_box(local, tensor.placement, tensor.shape, tensor._spec.group)


def shard_of(full: torch.Tensor, like: ShardedTensor) -> torch.Tensor:
    """This rank's shard of a full tensor, sharded the same way as ``like``."""
    local = slice_box(full, like.placement, dist.get_rank(like._spec.group))
    if like.dp_shard is None:
        return local
    if current_graph_task() != -1:
        raise RuntimeError(
            f"a gradient of shape {tuple(full.shape)} comes in part from a compiled graph and in part from Python "
            "code that read the parameter directly. data_parallel='shard' cannot add these: use 'replicate'."
        )
    return like.dp_shard.reshard(local)
