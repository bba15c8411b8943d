"""The loop of continuous batching: the first rank decides what a step computes, all ranks compute it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...context import ParallelExecutionCtx
from .blocks import BlockPool
from .channel import Channel
from .choose import choose
from .request import ERROR, Request
from .runner import Runner, agreed_blocks
from .scheduler import Part, Scheduler
from .step import Step

logger = logging.getLogger("paraxis")

IDLE = 5.0
"""Seconds after which the first rank sends a message without a step: a rank that is gone is noticed then."""


@dataclass
class Message:
    """What the first rank tells the others: a step, what to hand to the user, or to stop."""

    step: Step | None = None
    events: list[Any] = field(default_factory=list)
    stop: bool = False
    error: str = ""


@dataclass
class Counters:
    """What the loop has done since it began."""

    steps: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    shared_tokens: int = 0
    errors: int = 0


class Engine:
    """Computes requests, which arrive and end at any time, on all ranks of a parallel model.

    The first rank has the requests; the others follow. :meth:`run` is the loop, of which each rank runs one at a time.

    Args:
        runner: Runs the steps; its KV cache is allocated.
        channel: From the first rank to the others.
        max_requests: How many requests are computed at the same time.
        max_tokens: How many tokens a step computes.
        sharing: Whether requests share the KV cache of a common prefix.
        seed: Of draws for requests without a generator of their own.
        prefill_first: Whether prefills come before requests that decode.
        on_event: Called on the ranks that follow, with what the first one has sent them.
    """

    def __init__(
        self,
        runner: Runner,
        channel: Channel,
        max_requests: int,
        max_tokens: int,
        sharing: bool = True,
        seed: int | None = None,
        prefill_first: bool = False,
        on_event: Callable[[Any], None] | None = None,
    ) -> None:
        assert runner.cache is not None
        self.runner, self.channel, self.on_event = runner, channel, on_event
        pool = BlockPool(runner.cache.blocks, runner.cache.block_size, sharing)
        self.scheduler = Scheduler(pool, max_requests, max_tokens, prefill_first)
        self.generator = torch.Generator(runner.device)
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        self.counters = Counters()
        self.failure: BaseException | None = None
        self.events: list[Any] = []
        """What the next message hands to the ranks that follow."""
        self._arrived: deque[Request] = deque()
        self._wake = threading.Event()
        self._stopping = self._aborting = False
        self._over = False
        self._ending = threading.RLock()

    @property
    def capacity(self) -> int:
        """How many positions the KV cache holds."""
        return self.scheduler.pool.count * self.scheduler.pool.size

    def add(self, request: Request) -> None:
        """A new request, from any thread of the first rank."""
        self._arrived.append(request)
        self._wake.set()
        if self._over:
            self._fail_all("the batch has ended")

    def cancel(self, request: Request) -> None:
        """Nobody wants a request any more; from any thread."""
        request.cancelled = True
        self._wake.set()

    def stop(self, abort: bool = False) -> None:
        """End the loop when all requests have ended, or at once; from any thread of the first rank."""
        self._stopping, self._aborting = True, self._aborting or abort
        self._wake.set()

    def run(self) -> None:
        """The loop. It ends after :meth:`stop`, or with the error that made it impossible to go on."""
        try:
            if self.channel.is_first:
                self._lead()
            else:
                self._follow()
        except BaseException as error:
            self.failure, self._over = error, True
            if self.channel.is_first:
                self._fail_all(f"{type(error).__name__}: {error}")
                self._tell_failure(error)
            raise

    def _lead(self) -> None:
        last = time.monotonic()
        while True:
            self._wake.clear()
            self._take_up()
            parts = self.scheduler.schedule() if not self._aborting else []
            self._report(self.scheduler.remove_ended())
            if parts and any(part.request.ended for part in parts):
                continue
            if parts:
                self._compute(parts)
            elif self._stopping and not self._arrived and (self._aborting or not len(self.scheduler)):
                self._over = True
                self._fail_all("the batch was stopped")
                self.channel.send(Message(events=self._take_events(), stop=True))
                return
            elif self.events or time.monotonic() - last > IDLE:
                self.channel.send(Message(events=self._take_events()))
            else:
                self._wake.wait(IDLE / 5)
                continue
            last = time.monotonic()

    def _follow(self) -> None:
        while True:
            message: Message = self.channel.receive()
            for event in message.events:
                if self.on_event is not None:
                    self.on_event(event)
            if message.error:
                raise RuntimeError(f"the first rank has failed: {message.error}")
            if message.stop:
                return
            if message.step is not None:
                self.runner.run(message.step)

    def _take_up(self) -> None:
        """Hand new requests to the scheduler, and take out those that were cancelled."""
        while self._arrived:
            request = self._arrived.popleft()
            self.scheduler.add(request)
            if request.ended:
                self._report([request])
        self._report(self.scheduler.remove_ended())

    def _compute(self, parts: list[Part]) -> None:
        step = Step.of(parts)
        self.channel.send(Message(step, self._take_events()))
        logits = self.runner.run(step)
        requests = self.scheduler.computed(parts)
        for request, (token, logprobs) in zip(requests, choose(requests, logits, self.generator), strict=True):
            if not request.ended:
                if not request.tokens:
                    self.counters.prompt_tokens += len(request.prompt)
                    self.counters.shared_tokens += request.shared
                request.add(token, logprobs)
                self.counters.tokens += 1
        self.counters.steps += 1
        ended = self.scheduler.remove_ended()
        self._report([request for request in requests if not request.ended])
        self._report(ended)

    def _report(self, requests: list[Request]) -> None:
        for request in requests:
            self.counters.errors += request.ended == ERROR
            if request.on_change is not None:
                try:
                    request.on_change(request)
                except Exception:  # of somebody who listens to one request
                    logger.exception("a listener of request %s failed", request.name)

    def _take_events(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def _fail_all(self, why: str) -> None:
        """After the loop has ended; by its thread, and by those that add requests to it still."""
        with self._ending:
            self._take_up()
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                request.end(ERROR, why)
            self._report(self.scheduler.remove_ended())

    def _tell_failure(self, error: BaseException) -> None:
        try:
            self.channel.send(Message(events=self._take_events(), error=f"{type(error).__name__}: {error}"))
        except Exception as second:  # they are gone, or have failed in the same step
            logger.debug("the other ranks were not told: %s", second)


def fit_blocks(runner: Runner, memory: int, block_size: int, most: int | None) -> int:
    """How many blocks fit in so many bytes of this rank, and at most how many are of use."""
    found = memory // max(runner.measure() * block_size, 1)
    return max(int(found if most is None else min(found, most)), 1)


def make_runner(
    model: Any, ctx: ParallelExecutionCtx, memory: int, block_size: int, blocks: int | None, most: int | None
) -> Runner:
    """A runner with a KV cache that all ranks have room for. A collective."""
    runner = Runner(model, ctx)
    runner.measure()
    count = fit_blocks(runner, memory, block_size, most) if blocks is None else blocks
    runner.allocate(agreed_blocks(ctx, count), block_size)
    return runner
