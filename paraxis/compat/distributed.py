"""Private APIs of ``torch.distributed``.

Apart from :mod:`.torch`, since placements, rules and the solver must not reach ``torch.distributed``.
Seen on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _abort_process_group,
    _get_default_group,
    _get_default_store,
    _resolve_process_group,
)

__all__ = [
    "REFUSED_BY_REGISTRY",
    "abort_process_groups",
    "backend_name",
    "default_group",
    "default_store",
    "flattened_group",
    "group_timeout",
    "map_symmetric_memory",
    "reduce_in_place",
    "resolve_process_group",
    "root_mesh",
    "running_group_threads",
    "set_composable_registry",
    "simulated_store",
    "strided_shard",
]

resolve_process_group: Callable[[str], dist.ProcessGroup] = _resolve_process_group  # type: ignore[assignment]
"""The process group of a name: operators in a graph take the name."""

default_group: Callable[[], dist.ProcessGroup] = _get_default_group
"""The group of all ranks; raises with torch's own message if there is none."""

default_store: Callable[[], dist.Store] = _get_default_store
"""The key-value store through which the ranks found one another."""

abort_process_groups: Callable[[], None] = _abort_process_group
"""End all process groups without waiting for collectives that other ranks may never join."""

_GLOO_THREAD = "pt_gloo_runloop"
"""The name of the threads in which a gloo group runs its collectives."""


def running_group_threads() -> int:
    """How many threads of gloo groups are running or could run, rather than asleep; 0 where the system does not say.

    They keep the tensors of a collective for a moment after it is done, and nothing in torch tells when they let go.
    """
    found = 0
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        try:
            _, _, rest = (thread / "stat").read_text().partition(" (")
        except OSError:  # it has ended
            continue
        name, _, state = rest.rpartition(") ")
        found += name == _GLOO_THREAD and state[0] == "R"
    return found


REFUSED_BY_REGISTRY = ("fully_shard",)
"""Names that a composable wrapper looks up in a module's registry before it does anything else.

Not "replicate": readers of a state dict look that up too.
"""


def set_composable_registry(module: nn.Module, registry: dict[str, Any]) -> None:
    """Replace what composable wrappers (``fully_shard``) note of a module, if none was applied to it."""
    module.__dict__.setdefault(REGISTRY_KEY, registry)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """``gloo``, ``nccl``, ... : what a group communicates tensors of this device with.

    Raises:
        RuntimeError: The group has no backend for the device.
    """
    return str(group._get_backend(device).name()).lower()


_OPTIONS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@functools.cache
def _all_reduce_options(op: str) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = _OPTIONS[op]
    return options


def reduce_in_place(tensor: torch.Tensor, group: dist.ProcessGroup, op: str) -> None:
    """All-reduce a contiguous tensor in its memory, in the order of the current stream: ``dist.all_reduce`` without its
    checks, which take longer than the call of the backend."""
    work = group.allreduce([tensor], _all_reduce_options(op))
    if work is not None:
        work.wait()


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of this group waits for the other ranks."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one is a slice of, or itself."""
    return mesh._get_root_mesh()


def flattened_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """One group of all ranks of a mesh of several dimensions."""
    return mesh._flatten().get_group()


def strided_shard(dim: int, split_factor: int) -> Any:
    """DTensor's placement of a dimension that is sharded over an inner mesh dimension before an outer one."""
    from torch.distributed.tensor.placement_types import _StridedShard  # slow to import

    return _StridedShard(dim, split_factor=split_factor)


def simulated_store() -> dist.Store:
    """The store of the backend ``fake``, whose collectives return at once; importing it registers the backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def map_symmetric_memory(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Map a small symmetric tensor of every rank into all others; returns whether multicast is supported.

    A collective. Raises if the GPUs, the driver or torch cannot: no peer access, no NVLink, a build without it.
    """
    from torch.distributed import _symmetric_memory  # registers operators: only when asked for

    tensor = _symmetric_memory.empty(1024, dtype=torch.float32, device=device)
    handle: Any = _symmetric_memory.rendezvous(tensor, group)
    if handle is None or handle.world_size != group.size():
        raise RuntimeError("torch cannot map the memory of the ranks' GPUs")
    return bool(getattr(handle, "multicast_ptr", 0))
