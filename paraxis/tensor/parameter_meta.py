"""What is known of one parameter, before and after it has storage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ..distributed.dp_shard import DPShard
from ..placement import Placement

if TYPE_CHECKING:
    from .quantized import QuantizedWeight


class GradientReduction(Protocol):
    """What a parameter knows of the data-parallel gradient reduction that it takes part in."""

    def paused(self) -> AbstractContextManager[None]:
        """Inside, gradients are accumulated locally and not reduced."""


@dataclass(frozen=True)
class HashableSlice:
    """A slice that can be a dictionary key."""

    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def to_slice(self) -> slice:
        """The plain slice."""
        return slice(self.start, self.stop, self.step)


@dataclass
class ParameterSlice:
    """A piece of a tensor in the checkpoint: ``index`` on dimension ``ParameterMeta.dim`` of tensor ``source``."""

    source: str | None = None
    index: slice | None = None


@dataclass(eq=False)
class ParameterMeta:
    """What is known of one parameter, before and after it has storage.

    It travels with the parameter (``param.meta_info``) and is compared by identity: the compiled code is guarded on
    *which* parameter it sees, so a plan may still fill in the placement after the first capture.

    Attributes:
        name: Its first qualified name in the model.
        shape: The global shape.
        dtype: The dtype it will have.
        is_tied: Whether several modules share it.
        is_parallel: Whether it is sharded over the ranks.
        is_modified_meta: Whether the plan has fixed its placement.
        need_initialize: Whether it still has to be loaded or initialized.
        init_fn: Initialization function; overrides ``Config.weight_init_fn``.
        dim: The dimension that ``mapping`` slices.
        mapping: From slices of the local shard, along ``dim``, to slices of tensors in the checkpoint.
        placement: Where its elements live; ``None`` until the plan is solved.
        group: The tensor-parallel ranks, over which it is placed.
        source: A materialized tensor to slice it from, for modules that came with their weights.
        zero_rows: Rows (first, end) that are zero whatever the checkpoint has there.
        dp_shard: How data-parallel ranks divide the shard between them (FSDP), if they do.
        world_group: All ranks that hold shards or copies of it: those of the mesh.
        grad_reducer: Reduces its gradient over data-parallel ranks that hold copies of it (DDP).
        quantized: How it is quantized, if it is: its shard is then encoded.
    """

    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    is_tied: bool = False
    is_parallel: bool = False
    is_modified_meta: bool = False
    need_initialize: bool = False
    init_fn: Callable[..., Any] | None = None
    dim: int = 0
    mapping: dict[HashableSlice, ParameterSlice] = field(default_factory=dict)
    placement: Placement | None = None
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    source: torch.Tensor | None = field(default=None, repr=False)
    zero_rows: tuple[tuple[int, int], ...] = ()
    dp_shard: DPShard | None = field(default=None, repr=False)
    world_group: dist.ProcessGroup | None = field(default=None, repr=False)
    grad_reducer: GradientReduction | None = field(default=None, repr=False)
    quantized: QuantizedWeight | None = field(default=None, repr=False)

    @property
    def split(self) -> DPShard | None:
        """Deprecated: the former name of ``dp_shard``."""
        warnings.warn("ParameterMeta.split is called dp_shard now", DeprecationWarning, stacklevel=2)
        return self.dp_shard

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterMeta:
        # Dynamo copies the metadata it guards on; identity must survive that.
        return self
