"""A few numbers of every rank that all ranks of one machine can read at any time, without waiting for one another.

A rank posts a number per call. The others read it when they like: a collective between the posting and the reading
makes sure that it is there. Where ranks are on several machines, the store of the process group carries the numbers
(:mod:`.consensus`), at some hundred microseconds each.
"""

from __future__ import annotations

import mmap
import os
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from .consensus import all_gather_object
from .liveness import is_alive
from .shared_memory import CACHE_LINE, filesystem_id, map_file

SLOTS = 16
"""Posts of a rank that stay readable. Ranks are at most one call apart where a call has a collective."""
_WORDS = CACHE_LINE // 8 + 3 * SLOTS  # a cache line for the counter, then a count and two numbers each
SPINS = 2000
"""How often to poll before sleeping."""
LIVENESS_INTERVAL = 0.2
"""Seconds between checks whether the others are still alive."""


class Board:
    """The numbers that the ranks of a group have posted, in shared memory."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[int]) -> None:
        self.rank, self.processes = rank, processes
        self._words = memoryview(memory).cast("q")
        self._mine = rank * _WORDS

    def post(self, count: int, number: int, form: int = 0) -> None:
        """Post the numbers of this rank's ``count``-th call; counts start at 1."""
        words, at = self._words, self._mine + CACHE_LINE // 8 + 3 * (count % SLOTS)
        words[at + 1] = number
        words[at + 2] = form
        words[at] = count
        words[self._mine] = count

    def count_of(self, rank: int) -> int:
        """How many calls a rank has posted."""
        return self._words[rank * _WORDS]

    def number_of(self, rank: int, count: int, form: bool = False) -> int | None:
        """What a rank has posted for a call, the number or the form; None if it has not yet, or no longer."""
        at = rank * _WORDS + CACHE_LINE // 8 + 3 * (count % SLOTS)
        if self._words[at] != count:
            return None
        number = self._words[at + 2 if form else at + 1]
        return number if self._words[at] == count else None

    def wait(self, count: int, timeout: float, watch: Callable[[], None]) -> list[int]:
        """Wait until all ranks have posted ``count`` calls; the ranks that have not in time, or that have ended."""
        deadline, spins = time.monotonic() + timeout, 0
        checked = time.monotonic()
        while missing := [rank for rank in range(len(self.processes)) if self.count_of(rank) < count]:
            spins += 1
            if spins < SPINS:
                continue
            now = time.monotonic()
            if now - checked > LIVENESS_INTERVAL:
                checked = now
                watch()
                if ended := [rank for rank in missing if not is_alive(self.processes[rank])]:
                    return ended
            if now > deadline:
                return missing
            time.sleep(5e-5 if spins < 4 * SPINS else 1e-3)
        return []


def create_board(group: dist.ProcessGroup, timeout: float) -> Board | None:
    """The board of a group whose ranks share ``/dev/shm``; None for any other. A collective."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    size = world * _WORDS * 8
    path = f"/dev/shm/paraxis-{uuid.uuid4().hex}" if rank == 0 else ""
    filesystem, what = filesystem_id(), "setting up the comparison of inputs"
    memory = map_file(path, size, create=True) if rank == 0 and filesystem else None
    seen = all_gather_object(group, [filesystem, path if memory is not None else "", os.getpid()], what, timeout)
    shared = bool(filesystem) and len({theirs for theirs, _, _ in seen}) == 1 and bool(seen[0][1])
    if rank != 0 and shared:
        memory = map_file(seen[0][1], size, create=False)
    done = all_gather_object(group, shared and memory is not None, what, timeout)
    if rank == 0 and path and os.path.exists(path):
        os.unlink(path)  # all have it mapped, or none will: no file stays behind, however the ranks end
    if memory is None or not all(done):
        return None
    return Board(memory, rank, [pid for _, _, pid in seen])
