"""Which requests a step computes, and how many tokens of each.

Requests that decode come first, since somebody waits for each of their tokens; prefills fill the rest of the step, in
chunks if they are long, in the order of their arrival. Where the KV cache is full, the request that was admitted last
gives its blocks back and is computed again later: its tokens are the same.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from .blocks import BlockPool
from .request import CANCELLED, ERROR, Request


class Part(NamedTuple):
    """What a step computes of a request: its next ``tokens``."""

    request: Request
    tokens: int


class Scheduler:
    """The requests of a batch.

    Args:
        pool: The blocks of the KV cache.
        max_requests: How many requests are computed at the same time.
        max_tokens: How many tokens a step computes.
        prefill_first: Whether prefills come before requests that decode.
    """

    def __init__(self, pool: BlockPool, max_requests: int, max_tokens: int, prefill_first: bool = False) -> None:
        self.pool, self.max_requests, self.max_tokens = pool, max_requests, max_tokens
        self.prefill_first = prefill_first
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted = 0

    def __len__(self) -> int:
        """How many requests have not ended."""
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """A new request; one that the KV cache cannot hold ends at once."""
        capacity = self.pool.count * self.pool.size
        if len(request.prompt) + 1 > capacity:
            request.end(ERROR, f"a prompt of {len(request.prompt)} tokens: the KV cache holds {capacity} positions")
        else:
            self.waiting.append(request)

    def remove_ended(self) -> list[Request]:
        """Take out the requests that have ended or were cancelled, and release their blocks."""
        gone = []
        for request in [*self.running, *self.waiting]:
            if request.cancelled and not request.ended:
                request.end(CANCELLED)
            if request.ended:
                gone.append(request)
                self.pool.release(request.blocks)
                request.blocks = []
        if gone:
            self.running = [request for request in self.running if not request.ended]
            self.waiting = deque(request for request in self.waiting if not request.ended)
        return gone

    def schedule(self) -> list[Part]:
        """What the next step computes."""
        left, parts = self.max_tokens, list[Part]()
        decoding = [r for r in self.running if r.pending == 1]
        prefilling = [r for r in self.running if r.pending > 1]
        scheduled, preempted = set[int](), self.preempted
        for request in [*prefilling, *decoding] if self.prefill_first else [*decoding, *prefilling]:
            if self.preempted > preempted and request not in self.running:  # preempted for one before it
                continue
            count = min(request.pending, left)
            if not count or not self._reserve(request, count, scheduled):
                continue
            parts.append(Part(request, count))
            scheduled.add(id(request))
            left -= count
        while left > 0 and self.waiting and len(self.running) < self.max_requests:
            request = self.waiting[0]
            if not self._admit(request):
                break
            count = min(request.pending, left)
            if not self._reserve(request, count, None):
                self._take_back(request)
                break
            self.waiting.popleft()
            self.running.append(request)
            if request.started < 0:
                request.started = time.perf_counter()
            parts.append(Part(request, count))
            left -= count
        return parts

    def computed(self, parts: list[Part]) -> list[Request]:
        """A step has been computed; the requests that get a token."""
        found = []
        for request, count in parts:
            first = request.computed // self.pool.size
            request.computed += count
            if request.computed // self.pool.size > first:
                self.pool.fill(request.blocks, request.all_tokens(), first, request.computed)
            if not request.pending:
                found.append(request)
        return found

    def _admit(self, request: Request) -> bool:
        """Whether there is room for a request; it shares the blocks that hold the beginning of its prompt."""
        request.blocks = self.pool.match(request.all_tokens())
        request.computed = len(request.blocks) * self.pool.size
        missing = self.pool.blocks_for(request.length) - len(request.blocks)
        spare = min(len(self.running), self.pool.count // 16)  # those that decode will need blocks soon
        if missing + spare > self.pool.available and self.running:
            self._take_back(request)
            return False
        if not request.tokens:
            request.shared = request.computed
        return True

    def _take_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.computed = [], 0

    def _reserve(self, request: Request, count: int, scheduled: set[int] | None) -> bool:
        """Give a request the blocks for its next tokens; whether there were enough.

        ``scheduled``: the requests of this step that retain their blocks; None if no request gives back any.
        """
        needed = self.pool.blocks_for(request.computed + count)
        while len(request.blocks) < needed:
            block = self.pool.take()
            if block is not None:
                request.blocks.append(block)
                continue
            if scheduled is None:
                return False
            victim = next((r for r in reversed(self.running) if id(r) not in scheduled), request)
            if victim is request and len(self.running) == 1:
                request.end(ERROR, f"the KV cache is full: it holds {self.pool.count * self.pool.size} positions")
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._take_back(request)
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.preempted += 1
