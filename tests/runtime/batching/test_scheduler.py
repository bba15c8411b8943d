"""Which requests a step computes: decoding ones first, prefills in chunks, and what happens when the cache is full."""

from __future__ import annotations

import random

from paraxis.runtime.batching.blocks import BlockPool
from paraxis.runtime.batching.request import CANCELLED, ERROR, Request
from paraxis.runtime.batching.scheduler import Scheduler


def run_step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Compute a step without a model: every request that gets a token gets a 1."""
    parts = scheduler.schedule()
    for request in scheduler.computed(parts):
        request.add(1, None)
    scheduler.remove_ended()
    return [(request.name, tokens) for request, tokens in parts]


def test_prefills_fill_what_decoding_requests_leave() -> None:
    scheduler = Scheduler(BlockPool(16, 4), max_requests=2, max_tokens=5)
    for name, length in (("a", 2), ("b", 6), ("c", 1)):
        scheduler.add(Request(name, list(range(length)), 3))
    assert run_step(scheduler) == [("a", 2), ("b", 3)]
    assert run_step(scheduler) == [("a", 1), ("b", 3)], "the rest of its prompt"
    assert run_step(scheduler) == [("a", 1), ("b", 1)], "no room for a third request"
    assert run_step(scheduler) == [("b", 1), ("c", 1)]


def test_prefills_may_come_first() -> None:
    scheduler = Scheduler(BlockPool(16, 4), max_requests=4, max_tokens=4, prefill_first=True)
    scheduler.add(Request("a", [1], 9))
    run_step(scheduler)
    scheduler.add(Request("b", list(range(9)), 9))
    assert run_step(scheduler) == [("a", 1), ("b", 3)]
    assert run_step(scheduler) == [("b", 4)]


def test_a_full_cache_takes_blocks_from_the_last_request() -> None:
    scheduler = Scheduler(BlockPool(4, 2, sharing=False), max_requests=4, max_tokens=8)
    first, second = Request("a", [1, 2, 3], 5), Request("b", [4, 5, 6], 5)
    scheduler.add(first)
    scheduler.add(second)
    steps = 0
    while len(scheduler):
        run_step(scheduler)
        steps += 1
        assert steps < 40
    assert scheduler.preempted and len(first.tokens) == len(second.tokens) == 5
    assert scheduler.pool.available == 4


def test_requests_that_can_never_fit_end_with_an_error() -> None:
    scheduler = Scheduler(BlockPool(2, 2), max_requests=4, max_tokens=8)
    long = Request("a", [1] * 4, 1)
    scheduler.add(long)
    assert long.ended == ERROR and "a prompt of 4 tokens: the KV cache holds 4 positions" in long.error
    grows = Request("b", [1, 2], 9)
    scheduler.add(grows)
    for _ in range(5):
        run_step(scheduler)
    assert grows.ended == ERROR and "the KV cache is full" in grows.error and not len(scheduler)


def test_cancelled_requests_leave_at_once() -> None:
    scheduler = Scheduler(BlockPool(8, 2), max_requests=1, max_tokens=8)
    running, waiting = Request("a", [1, 2], 9), Request("b", [1, 2], 9)
    scheduler.add(running)
    scheduler.add(waiting)
    run_step(scheduler)
    running.cancelled = waiting.cancelled = True
    assert scheduler.remove_ended() == [running, waiting]
    assert running.ended == waiting.ended == CANCELLED and scheduler.pool.used == 0


def test_random_requests_all_end_and_return_their_blocks() -> None:
    draw = random.Random(1)
    scheduler = Scheduler(BlockPool(10, 3), max_requests=5, max_tokens=7)
    requests = [
        Request(str(i), [draw.randrange(3) for _ in range(draw.randrange(1, 15))], draw.randrange(1, 12))
        for i in range(60)
    ]
    for request in requests:
        scheduler.add(request)
    for _ in range(5000):
        parts = scheduler.schedule()
        assert sum(part.tokens for part in parts) <= 7 and len(scheduler.running) <= 5
        for request in scheduler.computed(parts):
            request.add(0, None)
        scheduler.remove_ended()
        if not len(scheduler):
            break
    assert all(len(request.tokens) == request.max_new_tokens for request in requests)
    assert scheduler.pool.available == 10 and scheduler.preempted
