"""Collectives on local tensors: what the differentiable ones are made of.

They are torch's functional collectives, which a compiler can trace and a ``fake`` process group can run,
made to fail in plain words; CPU ranks of one machine meet in shared memory instead (see
:mod:`paraxis.distributed.shared_memory`). None of them changes its input (but for one that is said to be of no other
use), none of them is differentiable, and on a single rank all of them return the input itself.

How long a rank waits for the others is the timeout of the process group
(``init_process_group(timeout=...)``). With gloo a failure is raised by the collective that failed; NCCL runs
asynchronously, and its own watchdog reports it unless ``TORCH_NCCL_BLOCKING_WAIT=1``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, Literal, ParamSpec

import torch
import torch.distributed as dist

from ..compat.distributed import backend_name, default_group, reduce_in_place, resolve_process_group
from ..compat.torch import dispatch_mode_depth, is_view, register_ordered_effect
from ..errors import CollectiveError
from ..placement import ensure_divisibility
from .shared_memory import SharedMemory, shared_memory_of

_ops = torch.ops._c10d_functional

ReduceOp = Literal["sum", "max", "min"]

_WIDER = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
"""Dtypes that backends refuse or, for bool, add up wrongly, and the dtype that carries them without loss."""


# -- counting -----------------------------------------------------------------------------------------------


@dataclass
class CollectiveCount:
    """How often each collective ran, and the bytes of the full tensors that they communicated."""

    counts: dict[str, int] = field(default_factory=Counter)
    bytes: int = 0

    @property
    def total(self) -> int:
        """The number of collectives of all kinds."""
        return sum(self.counts.values())


_counters: list[CollectiveCount] = []


@contextmanager
def count_collectives() -> Iterator[CollectiveCount]:
    """Count the collectives of this process while active. Those inside compiled code are not seen."""
    counter = CollectiveCount()
    _counters.append(counter)
    try:
        yield counter
    finally:
        # By identity: nested counters may be equal.
        _counters[:] = [c for c in _counters if c is not counter]


def _count(name: str, tensor: torch.Tensor, world: int) -> None:
    size = tensor.numel() * tensor.element_size() * (world if name == "all_gather" else 1)
    for counter in _counters:
        counter.counts[name] = counter.counts.get(name, 0) + 1
        counter.bytes += size


# -- what every collective does around its own work ---------------------------------------------------------


def _failure(name: str, tensor: torch.Tensor, group: dist.ProcessGroup, error: Exception) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    rank, world = group.rank(), group.size()
    outer = "" if world == dist.get_world_size() else f" (global rank {dist.get_rank()})"
    return (
        f"rank {rank} of {world}{outer}: {name} of a {dtype} tensor of shape {tuple(tensor.shape)} failed: "
        f"{str(error).rstrip('. ')}. The ranks may be running different programs (other inputs, another "
        "branch), or a rank has died; look for the first error on the other ranks. If they are only slow, "
        "raise the timeout of the process group."
    )


def _traced() -> bool:
    """Whether a compiler looks at this: Dynamo, or what comes after it."""
    return torch.compiler.is_compiling() or dispatch_mode_depth() > 0


P = ParamSpec("P")
Collective = Callable[Concatenate[torch.Tensor, "dist.ProcessGroup | None", P], torch.Tensor]


def _collective(
    function: Callable[Concatenate[torch.Tensor, dist.ProcessGroup, P], torch.Tensor],
) -> Collective[P]:
    """Skip single ranks, carry odd dtypes in wider ones, count, and explain failures.

    A compiler sees none of the last two: they are of no use in a graph and could break it.
    """
    name = function.__name__

    @functools.wraps(function)
    def run(
        tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *args: P.args, **kwargs: P.kwargs
    ) -> torch.Tensor:
        if group is None:
            group = default_group()
        if group.size() == 1:
            return tensor
        wider = _WIDER.get(tensor.dtype)
        if _traced():
            if wider is not None:
                return function(tensor.to(wider), group, *args, **kwargs).to(tensor.dtype)
            return function(tensor, group, *args, **kwargs)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} is not differentiable, but its input requires a gradient: use one of the "
                "differentiable functions of paraxis.distributed, or detach the tensor. (In a backward pass "
                "with create_graph=True this says that second derivatives are not available here.)"
            )
        if _counters:
            _count(name, tensor, group.size())
        try:
            if wider is not None:
                return function(tensor.to(wider), group, *args, **kwargs).to(tensor.dtype)
            result = function(tensor, group, *args, **kwargs)
            # Not a view of memory that nobody else has: autograd forbids to change such a one in place.
            return result.data if is_view(result) else result
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CollectiveError(_failure(name, tensor, group, error)) from error

    return run  # type: ignore[return-value]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same values.

    ``tensor.contiguous()`` alone is not the same to a compiler: where there is nothing to do it still makes a
    second name of one tensor, and between these two torch 2.11 loses the gradient of an autograd function.
    """
    return tensor if tensor.is_contiguous() else tensor.contiguous()


_backends: dict[tuple[str, str], str] = {}


@torch.compiler.assume_constant_result
def _backend(group_name: str, device_type: str) -> str:
    """The backend that serves tensors of this device, for those that lack a collective."""
    key = (group_name, device_type)
    if key not in _backends:
        group = resolve_process_group(group_name)
        _backends[key] = backend_name(group, torch.device(device_type))
    return _backends[key]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves tensors of this device."""
    return _backend(group.group_name, device.type)


# -- the collectives ----------------------------------------------------------------------------------------


def _host(tensor: torch.Tensor, group: dist.ProcessGroup) -> SharedMemory | _TracedSharedMemory | None:
    """Shared memory, where gloo would carry a CPU tensor between processes of one machine."""
    if not tensor.is_cpu:
        return None
    if torch.compiler.is_compiling():
        gloo = _backend(group.group_name, "cpu") == "gloo"
        return _TracedSharedMemory(group) if gloo and _meets(group.group_name) else None
    host = shared_memory_of(group)  # None where gloo does not serve the host
    return _TracedSharedMemory(group) if host is not None and dispatch_mode_depth() > 0 else host


@torch.compiler.assume_constant_result
def _meets(group_name: str) -> bool:
    """Whether the ranks of a group meet in shared memory; :func:`meet` has seen to it before anything is traced."""
    return shared_memory_of(resolve_process_group(group_name)) is not None


_library = torch.library.Library("paraxis", "FRAGMENT")
_library.define("host_all_reduce(Tensor x, str op, str group) -> Tensor")
_library.define("host_all_gather(Tensor x, str group) -> Tensor")


class _TracedSharedMemory:
    """Meeting in shared memory as operators, which a compiler leaves alone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name = group.group_name

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        return torch.ops.paraxis.host_all_reduce(tensor, op, self.name)  # type: ignore[no-any-return]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.ops.paraxis.host_all_gather(tensor, self.name)  # type: ignore[no-any-return]


def _host_by_name(name: str) -> SharedMemory:
    host = shared_memory_of(resolve_process_group(name))
    assert host is not None
    return host


def _gathered_shape(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty((resolve_process_group(group).size(), *x.shape))


_library.impl("host_all_reduce", lambda x, op, group: _host_by_name(group).all_reduce(x, op), "CPU")
_library.impl("host_all_gather", lambda x, group: _host_by_name(group).all_gather(x), "CPU")
torch.library.register_fake("paraxis::host_all_reduce", lambda x, op, group: x.new_empty(x.shape), lib=_library)
torch.library.register_fake("paraxis::host_all_gather", _gathered_shape, lib=_library)
for _name in ("host_all_reduce", "host_all_gather"):  # a compiler must keep them in the order of the program
    register_ordered_effect(f"paraxis::{_name}")


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Set up what CPU ranks meet in, if anything, before a compiler traces collectives. All ranks together."""
    if device.type == "cpu" and group.size() > 1 and _backend(group.group_name, "cpu") == "gloo":
        shared_memory_of(group)


@_collective
def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: ReduceOp = "sum", own: bool = False) -> torch.Tensor:
    """The sum (or ``op``) over the ranks, elementwise, on every rank. ``own``: the tensor has no other use, so that the
    result may be written over it."""
    host = _host(tensor, group)
    if host is not None:
        return host.all_reduce(tensor, op)
    if own and tensor.is_contiguous() and not _traced():
        reduce_in_place(tensor, group, op)
        return tensor
    return _ops.wait_tensor(_ops.all_reduce(tensor, op, group.group_name))


@_collective
def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = -1) -> torch.Tensor:
    """The tensors of all ranks, of equal shape, concatenated along ``dim`` in the order of the ranks."""
    dim, world = dim % tensor.ndim, group.size()
    if tensor.device.type != "cpu" and _backend(group.group_name, tensor.device.type) == "gloo":
        # Gloo's functional all-gather takes the memory to be the host's, and crashes.
        parts = [_ops.broadcast(dense(tensor), rank, group.group_name) for rank in range(world)]
        return torch.cat([_ops.wait_tensor(part) for part in parts], dim)
    host = _host(tensor, group)
    if host is not None:
        stacked = host.all_gather(tensor)
    else:
        flat = _ops.wait_tensor(_ops.all_gather_into_tensor(dense(tensor), world, group.group_name))
        stacked = flat.unflatten(0, (world, tensor.shape[0]))
    # No copy if all dimensions before `dim` have size one, as in decoding a single token.
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


@_collective
def reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = -1) -> torch.Tensor:
    """This rank's chunk, along ``dim``, of the sum over the ranks. The chunks are even."""
    dim, world = dim % tensor.ndim, group.size()
    ensure_divisibility(tensor.shape[dim], world, dim=f"dimension {dim} of a reduce_scatter")
    if _backend(group.group_name, tensor.device.type) in ("gloo", "mpi"):
        # These have none, or one that is an all-reduce inside.
        host = _host(tensor, group)
        summed = host.all_reduce(tensor, "sum") if host is not None else _sum(tensor, group)
        return dense(split(summed, group, dim))
    if dim != 0:
        tensor = tensor.unflatten(dim, (world, tensor.shape[dim] // world)).movedim(dim, 0).flatten(0, 1)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(dense(tensor), "sum", world, group.group_name))


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _ops.wait_tensor(_ops.all_reduce(tensor, "sum", group.group_name))


@_collective
def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, src: int = 0) -> torch.Tensor:
    """The tensor of rank ``src`` of the group, on every rank. All pass one of the same shape and dtype."""
    return _ops.wait_tensor(_ops.broadcast(dense(tensor), src, group.group_name))


def split(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = -1) -> torch.Tensor:
    """This rank's chunk along ``dim``, as a view, without communication. The chunks are even."""
    if group is None:
        group = default_group()
    world = group.size()
    if world == 1:
        return tensor
    ensure_divisibility(tensor.shape[dim], world, dim=f"dimension {dim} of a split")
    size = tensor.shape[dim] // world
    return tensor.narrow(dim, group.rank() * size, size)


scatter = split
"""Split by its name among the collectives: to scatter what every rank has needs no communication."""
