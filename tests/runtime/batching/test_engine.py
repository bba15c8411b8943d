"""The loop of continuous batching, with a model that counts: the token after n is n + 1."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from paraxis.runtime.batching.engine import Engine, Message
from paraxis.runtime.batching.request import CANCELLED, ERROR, LENGTH, STOP, Request
from paraxis.runtime.batching.step import Step

VOCABULARY = 64


class Counting:
    """Runs steps without a model, on one rank."""

    device = torch.device("cpu")

    def __init__(self, fails_at: int = -1) -> None:
        self.cache = SimpleNamespace(blocks=16, block_size=4)
        self.steps, self.fails_at = 0, fails_at

    def run(self, step: Step) -> torch.Tensor:
        """Logits of the rows."""
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("a rank is gone")
        return torch.eye(VOCABULARY)[(torch.from_numpy(step.ids)[step.rows] + 1) % VOCABULARY]


class Messages:
    """In the place of a channel: what was sent, or what is received."""

    alone = True

    def __init__(self, received: list[Message] | None = None) -> None:
        self.is_first, self.sent, self.received = received is None, list[Message](), received or []

    def send(self, message: Message) -> None:
        """To nobody."""
        self.sent.append(message)

    def receive(self) -> Message:
        """The next one."""
        return self.received.pop(0)


def engine_of(runner: Any, messages: Any) -> Engine:
    """An engine of three requests at a time, five tokens a step."""
    return Engine(runner, messages, 3, 5, seed=0)


def in_thread(engine: Engine) -> threading.Thread:
    """The loop, whose error is in ``engine.failure``."""

    def run() -> None:
        try:
            engine.run()
        except RuntimeError:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def wait_for(condition: Any) -> None:
    """Wait a minute at most."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_requests_arrive_and_end_while_others_run() -> None:
    messages = Messages()
    engine = engine_of(Counting(), messages)
    thread = in_thread(engine)
    seen: list[int] = []
    first = Request("a", [3, 4, 5, 6, 7, 8, 9], 4, on_change=lambda r: seen.append(len(r.tokens)))
    stops = Request("b", [10], 20, frozenset({14}))
    endless = Request("c", [20], 40, on_change=lambda r: engine.cancel(r) if len(r.tokens) == 7 else None)
    for request in (first, stops, endless):
        engine.add(request)
    wait_for(lambda: endless.ended)
    late = Request("d", [1, 2], 3)
    engine.add(late)
    engine.stop()
    thread.join(60)
    assert not thread.is_alive() and messages.sent[-1].stop
    assert (first.tokens, first.ended, seen[-1]) == ([10, 11, 12, 13], LENGTH, 4)
    assert (stops.tokens, stops.ended) == ([11, 12, 13, 14], STOP)
    assert endless.ended == CANCELLED and len(endless.tokens) == 7 and late.tokens == [3, 4, 5]
    assert engine.scheduler.pool.used == 0 and engine.counters.tokens == 18
    after = Request("e", [1], 3)
    engine.add(after)
    assert after.ended == ERROR, "nobody waits for a batch that has ended"


def test_requests_that_are_added_after_the_end_all_fail() -> None:
    class Slow(deque[Request]):
        def __len__(self) -> int:
            found = super().__len__()
            time.sleep(0.005)
            return found

    engine = engine_of(Counting(), Messages())
    engine.stop()
    engine.run()
    engine._arrived = Slow()
    requests = [Request(str(i), [i], 3) for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(engine.add, requests))
    assert all(request.ended == ERROR for request in requests)


def test_a_failure_ends_all_requests_and_is_told() -> None:
    messages = Messages()
    engine = engine_of(Counting(fails_at=3), messages)
    requests = [Request(str(i), [i], 10) for i in range(5)]
    for request in requests:
        engine.add(request)
    in_thread(engine).join(60)
    assert str(engine.failure) == "a rank is gone" and "a rank is gone" in messages.sent[-1].error
    assert all(request.ended == ERROR and "a rank is gone" in request.error for request in requests)


def test_aborting_does_not_wait_for_requests() -> None:
    engine = engine_of(Counting(), Messages())
    request = Request("a", [1], 60)
    engine.add(request)
    engine.stop(abort=True)
    engine.run()
    assert request.ended == ERROR and request.error == "the batch was stopped"


def test_other_ranks_run_the_steps_they_are_sent() -> None:
    request = Request("a", [1, 2], 3)
    request.blocks = [0]
    step = Step.of([(request, 2)])  # type: ignore[list-item]
    runner, events = Counting(), list[Any]()
    engine = engine_of(runner, Messages([Message(step), Message(events=["x"]), Message(stop=True)]))
    engine.on_event = events.append
    engine.run()
    assert runner.steps == 1 and events == ["x"]
    failing = engine_of(runner, Messages([Message(error="no memory")]))
    in_thread(failing).join(60)
    assert "the first rank has failed: no memory" in str(failing.failure)
