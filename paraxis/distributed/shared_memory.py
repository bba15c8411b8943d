"""Collectives of CPU ranks on one machine, through shared memory.

Decoding a token sums a few kilobytes some fifty times. Through gloo's sockets and threads each of these sums takes
about a millisecond; here a rank writes its tensor into a buffer that all ranks have mapped, raises its counter, waits
for the counters of the others, and adds up what it reads: less than a tenth of that. Every rank adds in the same
order, so that all of them get the same bits.

Two slots per rank take turns. A rank that writes slot ``n`` has seen all others arrive at ``n - 1``, so they are done
with what was in that slot before.

Used for groups whose ranks all run on one Linux machine and share ``/dev/shm``; any other group keeps to its backend.
``PARAXIS_SHARED_MEMORY=0`` turns it off.
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

from .liveness import is_alive, machine

BUDGET = 32 << 20
"""Bytes of shared memory for all slots of a group."""
LINE = 64
"""Bytes of a cache line: counters of different ranks do not share one."""
SPINS = 2000
"""How often to look before giving way to other processes."""
LABEL = 46
"""The bits above this one say what is exchanged; those below how many bytes, and how."""
KINDS = 256
"""Shapes of tensors for which views of the slots are kept."""
PATIENCE = 0.2
"""Seconds between looks at whether the others are still alive."""

_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_KINDS = {"all_reduce": 1, "all_gather": 2}
_groups: WeakKeyDictionary[Any, SharedMemory | None] = WeakKeyDictionary()


def shared_memory_of(group: dist.ProcessGroup) -> SharedMemory | None:
    """The shared memory of a group, made when it is first asked for, by all ranks together; None if it has none."""
    try:
        return _groups[group]
    except KeyError:
        return _groups.setdefault(group, _make(group))


@contextmanager
def labelled(group: dist.ProcessGroup, name: str) -> Iterator[None]:
    """Say what is exchanged inside, so that ranks that are elsewhere in the program do not take it for something else.

    Only shared memory has room for that: elsewhere a difference in size is all that can be noticed.
    """
    host = _groups.get(group)
    if host is None:
        yield
        return
    host.label = zlib.crc32(name.encode()) & 0xFFFF
    try:
        yield
    finally:
        host.label = 0


class SharedMemory:
    """The shared memory of the ranks of one group."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[int], timeout: float) -> None:
        self.rank, self.world, self.processes, self.timeout = rank, len(processes), processes, timeout
        self.capacity = slot_size(self.world)
        self._count = 0
        self.label = 0
        """A number for what is exchanged; ranks that all_gather_object other things fail. See :func:`labelled`."""
        header = self.world * LINE
        self._flags = memoryview(memory)[:header].cast("q")  # per rank: a counter, and what is in either slot
        self._memory, self._offset = memory, header
        self._slots: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._parts: dict[tuple[torch.dtype, torch.Size, int], list[torch.Tensor]] = {}

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The sum, or largest or smallest, of the tensors of all ranks."""
        combine = _OPS[op]
        step = self.capacity // tensor.element_size()
        if 0 < tensor.numel() <= step:  # the usual one, which is short: nothing but a copy and a sum
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
        """The tensors of all ranks, along a new first dimension."""
        flat = tensor.reshape(-1)
        result = torch.empty((self.world, flat.numel()), dtype=tensor.dtype)
        step = self.capacity // tensor.element_size()
        for start in range(0, flat.numel(), step):
            parts = self._exchange(flat[start : start + step], "all_gather")
            for rank, part in enumerate(parts):
                result[rank, start : start + step].copy_(part)
        return result.view(self.world, *tensor.shape)

    def _exchange(self, part: torch.Tensor, kind: str) -> list[torch.Tensor]:
        """Show the others a tensor that fits into a slot, and see theirs."""
        self._count += 1
        count, flags, slot, size = self._count, self._flags, self._count & 1, part.numel()
        key = (part.dtype, part.shape, slot)
        slots = self._parts.get(key) or self._part(*key)
        mine = 8 * self.rank
        slots[self.rank].copy_(part)
        what = self.label << LABEL | size * part.element_size() << 3 | _KINDS[kind]
        flags[mine + 1 + slot] = what
        flags[mine] = count
        for rank in range(self.world):
            if flags[8 * rank] < count:
                self._wait(rank, count)
            if flags[8 * rank + 1 + slot] != what:
                raise RuntimeError(self._mismatch(rank, flags[8 * rank + 1 + slot]))
        return slots

    def _part(self, dtype: torch.dtype, shape: torch.Size, slot: int) -> list[torch.Tensor]:
        """The beginning of the slots of all ranks, as tensors like these; made once for each kind of tensor."""
        if len(self._parts) >= KINDS:
            self._parts.clear()
        with torch.inference_mode(False), torch.no_grad():
            slots = self._slots.get(dtype) or self._as(dtype)
            parts = [mine[slot][: shape.numel()].view(shape) for mine in slots]
        self._parts[dtype, shape, slot] = parts
        return parts

    def _as(self, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The slots of all ranks as tensors of this dtype, also usable outside of the mode they were made in."""
        with torch.inference_mode(False):
            count = self.capacity // dtype.itemsize
            offsets = [self._offset + k * self.capacity for k in range(2 * self.world)]
            flat = [torch.frombuffer(self._memory, dtype=dtype, offset=at, count=count) for at in offsets]
            self._slots[dtype] = list(zip(flat[::2], flat[1::2], strict=True))
        return self._slots[dtype]

    def _wait(self, rank: int, count: int) -> None:
        flags, spins, began = self._flags, 0, 0.0
        looked = began
        while flags[8 * rank] < count:
            spins += 1
            if spins < SPINS:
                continue
            now = time.monotonic()
            if not began:
                began = looked = now
            if now - began > self.timeout:
                raise RuntimeError(f"rank {rank} did not arrive within {self.timeout:.0f} s")
            if now - looked > PATIENCE:
                looked = now
                if not is_alive(self.processes[rank]):
                    raise RuntimeError(f"rank {rank} (process {self.processes[rank]}) has ended")
            time.sleep(0 if now - began < 0.002 else 5e-5)

    def _mismatch(self, rank: int, what: int) -> str:
        kind = next((name for name, code in _KINDS.items() if code == what & 7), "something else")
        other = " of another parameter" if what >> LABEL != self.label else ""
        return f"rank {rank} is in {kind} of {(what & (1 << LABEL) - 1) >> 3} bytes{other}"


def slot_size(world: int) -> int:
    """Bytes of one slot: a whole number of elements of any dtype."""
    return BUDGET // (2 * world) // LINE * LINE


# -- making it -----------------------------------------------------------------------------------------------------


def _make(group: dist.ProcessGroup) -> SharedMemory | None:
    """All ranks map the same file, or none does. Only gloo is worth being stood in for, and others are no processes."""
    try:
        if group._get_backend(torch.device("cpu")).name().lower() != "gloo":
            return None
    except RuntimeError:  # no backend for tensors of the host
        return None
    rank, world = group.rank(), group.size()
    size = world * LINE + 2 * world * slot_size(world)
    path = f"/dev/shm/paraxis-{uuid.uuid4().hex}" if rank == 0 else ""
    here = _place()
    memory = _map(path, size, create=True) if rank == 0 and here else None
    seen: list[Any] = [None] * world
    dist.all_gather_object(seen, (here, path if memory is not None else "", os.getpid()), group=group)
    alike = bool(here) and len({place for place, _, _ in seen}) == 1 and bool(seen[0][1])
    if rank != 0 and alike:
        memory = _map(seen[0][1], size, create=False)
    done: list[Any] = [None] * world
    dist.all_gather_object(done, alike and memory is not None, group=group)
    if rank == 0 and path and os.path.exists(path):
        os.unlink(path)  # all have it open, or nobody will: nothing is left behind, however the ranks end
    if memory is None or not all(done):
        return None
    timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return SharedMemory(memory, rank, [pid for _, _, pid in seen], timeout)


def _place() -> str:
    """What ranks must have in common; empty where shared memory is not for us.

    Processors other than x86 may show writes to others in another order than they were made.
    """
    if os.environ.get("PARAXIS_SHARED_MEMORY", "1") == "0" or platform.machine() not in ("x86_64", "AMD64"):
        return ""
    try:
        return machine() and machine() + str(os.stat("/dev/shm").st_dev)
    except OSError:
        return ""


def _map(path: str, size: int, create: bool) -> mmap.mmap | None:
    try:
        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    except OSError:
        return None
    try:
        if create:
            os.posix_fallocate(file, 0, size)  # or the first write to a full disk would kill the process
        return mmap.mmap(file, size)
    except OSError:
        return None
    finally:
        os.close(file)
