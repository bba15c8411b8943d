"""Collectives of CPU ranks on one machine, through shared memory.

A decode step all-reduces a few kilobytes some fifty times. Through gloo's sockets and threads each all-reduce takes
about a millisecond; here a rank writes its tensor into a buffer that all ranks have mapped, increments its counter,
waits for the counters of the others, and sums what it reads: less than a tenth of that. Every rank sums in the same
order, so that all of them get the same bits.

Every rank has two slots, used alternately. A rank that writes slot ``n`` has seen all others arrive at ``n - 1``, so
they have finished reading the previous contents of that slot.

Used for groups whose ranks all run on one Linux machine and share ``/dev/shm``; any other group uses its own backend.
``PARAXIS_SHARED_MEMORY=0`` disables it.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..compat.distributed import backend_name, group_timeout
from .activity import activity_of, current_activity
from .consensus import wait_limit, where_ranks_are
from .liveness import is_alive, look_around, machine_id

TOTAL_BYTES = 32 << 20
"""Bytes of shared memory for all slots of a group."""
CACHE_LINE = 64
"""Bytes of a cache line: counters of different ranks do not share one."""
SPINS_BEFORE_YIELD = 2000
"""How often to poll a counter before yielding the CPU to other processes."""
LABEL_SHIFT = 46
"""The bits from this one on say what is exchanged; those below how many bytes, and by which collective."""
MAX_CACHED_VIEWS = 256
"""Shapes and dtypes for which views of the slots are cached."""
LIVENESS_INTERVAL = 0.2
"""Seconds between checks whether the others are still alive."""

_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_KINDS = {"all_reduce": 1, "all_gather": 2}
_groups: WeakKeyDictionary[Any, SharedMemory | None] = WeakKeyDictionary()


def shared_memory_of(group: dist.ProcessGroup) -> SharedMemory | None:
    """The shared memory of a group, created by all ranks on first use; None if the group has none."""
    try:
        return _groups[group]
    except KeyError:
        return _groups.setdefault(group, _create(group))


@contextmanager
def labelled(group: dist.ProcessGroup, name: str) -> Iterator[None]:
    """Label the collectives inside, so that ranks that exchange different things at the same time raise an error.

    Only shared memory can carry a label: with other backends only a difference in size is noticed.
    """
    memory = _groups.get(group)
    if memory is None:
        yield
        return
    memory.label = zlib.crc32(name.encode()) & 0xFFFF
    try:
        yield
    finally:
        memory.label = 0


class SharedMemory:
    """The shared memory of the ranks of one group."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[int], timeout: float) -> None:
        self.rank, self.world, self.processes, self.timeout = rank, len(processes), processes, timeout
        self.capacity = slot_size(self.world)
        self.sync_timeout = timeout
        """Seconds after which to raise if the missing rank is in another public call."""
        self.global_ranks = list(range(self.world))
        self._count = 0
        self.label = 0
        """A number for what is exchanged; ranks that exchange other things fail. See :func:`labelled`."""
        header = self.world * CACHE_LINE
        self._flags = memoryview(memory)[:header].cast("q")  # per rank: a counter, and the contents of either slot
        self._memory, self._offset = memory, header
        self._slots: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._views: dict[tuple[torch.dtype, torch.Size, int], list[torch.Tensor]] = {}

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The elementwise sum, maximum or minimum of the tensors of all ranks."""
        combine = _OPS[op]
        step = self.capacity // tensor.element_size()
        if 0 < tensor.numel() <= step:  # the common case: a copy and a sum
            first, second, *others = self._exchange(tensor, "all_reduce")
            total = combine(first, second)
            for part in others:
                total = combine(total, part)
            return total
        flat = tensor.reshape(-1)
        results = []
        for start in range(0, flat.numel(), step):
            parts = self._exchange(flat[start : start + step], "all_reduce")
            total = combine(parts[0], parts[1])
            for part in parts[2:]:
                total = combine(total, part)
            results.append(total)
        if not results:
            return tensor
        return (results[0] if len(results) == 1 else torch.cat(results)).view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, stacked along a new first dimension."""
        flat = tensor.reshape(-1)
        result = torch.empty((self.world, flat.numel()), dtype=tensor.dtype)
        step = self.capacity // tensor.element_size()
        for start in range(0, flat.numel(), step):
            parts = self._exchange(flat[start : start + step], "all_gather")
            for rank, part in enumerate(parts):
                result[rank, start : start + step].copy_(part)
        return result.view(self.world, *tensor.shape)

    def _exchange(self, part: torch.Tensor, kind: str) -> list[torch.Tensor]:
        """Write a tensor that fits into a slot, wait for the other ranks, and return views of all slots."""
        self._count += 1
        count, flags, slot, size = self._count, self._flags, self._count & 1, part.numel()
        key = (part.dtype, part.shape, slot)
        slots = self._views.get(key) or self._view(*key)
        mine = 8 * self.rank
        slots[self.rank].copy_(part)
        what = self.label << LABEL_SHIFT | size * part.element_size() << 3 | _KINDS[kind]
        flags[mine + 1 + slot] = what
        flags[mine] = count
        for rank in range(self.world):
            if flags[8 * rank] < count:
                self._wait(rank, count)
            if flags[8 * rank + 1 + slot] != what:
                raise RuntimeError(self._mismatch(rank, flags[8 * rank + 1 + slot]))
        return slots

    def _view(self, dtype: torch.dtype, shape: torch.Size, slot: int) -> list[torch.Tensor]:
        """The slots of all ranks, viewed as tensors of this dtype and shape; cached."""
        if len(self._views) >= MAX_CACHED_VIEWS:
            self._views.clear()
        with torch.inference_mode(False), torch.no_grad():
            slots = self._slots.get(dtype) or self._typed_slots(dtype)
            views = [mine[slot][: shape.numel()].view(shape) for mine in slots]
        self._views[dtype, shape, slot] = views
        return views

    def _typed_slots(self, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The slots of all ranks as flat tensors of this dtype, usable inside and outside of inference mode."""
        with torch.inference_mode(False):
            count = self.capacity // dtype.itemsize
            offsets = [self._offset + k * self.capacity for k in range(2 * self.world)]
            flat = [torch.frombuffer(self._memory, dtype=dtype, offset=at, count=count) for at in offsets]
            self._slots[dtype] = list(zip(flat[::2], flat[1::2], strict=True))
        return self._slots[dtype]

    def _wait(self, rank: int, count: int) -> None:
        """Wait until a rank's counter reaches ``count``: spin first, then yield, then sleep."""
        flags, spins, began = self._flags, 0, 0.0
        checked = began
        while flags[8 * rank] < count:
            spins += 1
            if spins < SPINS_BEFORE_YIELD:
                continue
            now = time.monotonic()
            if not began:
                began = checked = now
            if now - began > self.timeout:
                raise RuntimeError(f"rank {rank} did not arrive within {self.timeout:.0f} s")
            if now - checked > LIVENESS_INTERVAL:
                checked = now
                look_around()
                if not is_alive(self.processes[rank]):
                    raise RuntimeError(f"rank {rank} (process {self.processes[rank]}) has ended")
                if now - began > self.sync_timeout:
                    self._raise_if_elsewhere(rank)
            time.sleep(0 if now - began < 0.002 else 5e-5)

    def _raise_if_elsewhere(self, rank: int) -> None:
        """Raise if a rank is in another public call: it will not come. One that runs code of its own may be slow."""
        theirs = activity_of(self.global_ranks[rank])[0]
        if theirs and theirs != current_activity():
            missing = where_ranks_are([self.global_ranks[rank]])
            raise RuntimeError(f"rank {rank} did not arrive within {self.sync_timeout:g} s: {missing}")

    def _mismatch(self, rank: int, what: int) -> str:
        kind = next((name for name, code in _KINDS.items() if code == what & 7), "another collective")
        other = " of another parameter" if what >> LABEL_SHIFT != self.label else ""
        return f"rank {rank} is in {kind} of {(what & (1 << LABEL_SHIFT) - 1) >> 3} bytes{other}"


def slot_size(world: int) -> int:
    """Bytes of one slot: a multiple of the cache line, hence of the element size of any dtype."""
    return TOTAL_BYTES // (2 * world) // CACHE_LINE * CACHE_LINE


# -- setting it up -------------------------------------------------------------------------------------------------


def _create(group: dist.ProcessGroup) -> SharedMemory | None:
    """All ranks map the same file, or none does. Only gloo groups: ranks of a fake group have no process."""
    try:
        if backend_name(group, torch.device("cpu")) != "gloo":
            return None
    except RuntimeError:  # no backend for CPU tensors
        return None
    rank, world = group.rank(), group.size()
    size = world * CACHE_LINE + 2 * world * slot_size(world)
    path = f"/dev/shm/paraxis-{uuid.uuid4().hex}" if rank == 0 else ""
    filesystem = filesystem_id()
    memory = map_file(path, size, create=True) if rank == 0 and filesystem else None
    seen: list[Any] = [None] * world
    dist.all_gather_object(seen, (filesystem, path if memory is not None else "", os.getpid()), group=group)
    shared = bool(filesystem) and len({theirs for theirs, _, _ in seen}) == 1 and bool(seen[0][1])
    if rank != 0 and shared:
        memory = map_file(seen[0][1], size, create=False)
    done: list[Any] = [None] * world
    dist.all_gather_object(done, shared and memory is not None, group=group)
    if rank == 0 and path and os.path.exists(path):
        os.unlink(path)  # all have it mapped, or none will: no file stays behind, however the ranks end
    if memory is None or not all(done):
        return None
    timeout = group_timeout(group, torch.device("cpu")).total_seconds()
    limit = wait_limit(group)
    found = SharedMemory(memory, rank, [pid for _, _, pid in seen], timeout)
    found.sync_timeout = timeout if limit is None else limit
    found.global_ranks = dist.get_process_group_ranks(group)
    return found


def filesystem_id() -> str:
    """The same text on ranks that share ``/dev/shm``; empty where shared memory cannot be used.

    On processors other than x86 another process may see writes in a different order.
    """
    if os.environ.get("PARAXIS_SHARED_MEMORY", "1") == "0" or platform.machine() not in ("x86_64", "AMD64"):
        return ""
    try:
        return machine_id() and machine_id() + str(os.stat("/dev/shm").st_dev)
    except OSError:
        return ""


def map_file(path: str, size: int, create: bool) -> mmap.mmap | None:
    try:
        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    except OSError:
        return None
    try:
        if create:
            os.posix_fallocate(file, 0, size)  # otherwise the first write to a full disk would kill the process
        return mmap.mmap(file, size)
    except OSError:
        return None
    finally:
        os.close(file)
