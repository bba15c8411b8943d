"""A repeated prefill is launched before it is prepared, and taken only if the call comes to the same graph and inputs.

A fake CUDA graph and streams without effect stand in for the real ones, which need a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paraxis.runtime.cuda_graphs import CUDAGraphRunner
from paraxis.runtime.early_launch import MAX_WRONG, EarlyLaunches


class FakeGraph:
    """Doubles its input into the result that it had."""

    def __init__(self) -> None:
        self.launches = 0

    def replay(self) -> None:
        self.launches += 1
        self.result.copy_(2 * self.argument)


class Prefill:
    """A program that does not write to its inputs."""

    def __init__(self) -> None:
        self.graph: FakeGraph | None = None

    def __call__(self, weight: torch.Tensor, prompt: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
        result = 2 * prompt
        if FakeCapture.running is not None:
            FakeCapture.running.argument, FakeCapture.running.result = prompt, result
        return [result]


class FakeCapture:
    running: FakeGraph | None = None


@contextmanager
def fake_capture(graph: FakeGraph, pool: Any, capture_error_mode: str) -> Iterator[None]:
    FakeCapture.running = graph
    yield
    FakeCapture.running = None


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: None, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda each: nullcontext())


class Call:
    """What ``generate`` does, as far as this is concerned: prepare, and run a program on a copy of the prompt."""

    def __init__(self) -> None:
        self.early = EarlyLaunches(torch.device("cpu"))
        self.runner = CUDAGraphRunner(Prefill(), [], [], object(), self.early)
        self.weight, self.other = torch.ones(4), torch.zeros(2)

    def __call__(self, prompt: torch.Tensor, other: torch.Tensor | None = None, changed: Any = None) -> Any:
        with self.early.prefill_of(prompt):
            passed = prompt.clone() if changed is None else changed
            return self.runner([self.weight], [passed, self.other if other is None else other])[0]

    @property
    def launches(self) -> int:
        return sum(graph.graph.launches for graph in self.runner.graphs)  # type: ignore[attr-defined]


def prompt(value: int) -> torch.Tensor:
    return torch.full((1, 8), value)


def test_third_call_takes_the_early_launch() -> None:
    call = Call()
    for value in range(6):
        assert torch.equal(call(prompt(value)), prompt(2 * value))
    assert call.early.taken == 4 and call.early.wasted == 0, "run, captured and learned, then launched early"
    assert call.launches == 5, "each call has launched once"


def test_results_are_copies() -> None:
    call = Call()
    results = [call(prompt(value)) for value in range(6)]
    assert [int(x[0, 0]) for x in results] == [0, 2, 4, 6, 8, 10]


def test_other_inputs_than_the_launch_had() -> None:
    """The call prepares another prompt than the one it began with, or something else is not as before."""
    call = Call()
    for value in range(4):
        call(prompt(value))
    assert torch.equal(call(prompt(4), changed=prompt(7)), prompt(14)) and call.early.wasted == 1
    for value in range(4):
        call(prompt(value))
    assert torch.equal(call(prompt(5), other=torch.ones(2)), prompt(10)) and call.early.wasted == 2
    before = call.early.taken
    for value in range(4):
        assert torch.equal(call(prompt(value)), prompt(2 * value))
    assert MAX_WRONG == 2 and call.early.taken == before, "not tried any more"


def test_other_weights_are_not_launched_early(monkeypatch: pytest.MonkeyPatch) -> None:
    from paraxis.runtime import cuda_graphs

    call = Call()
    for value in range(4):
        call(prompt(value))
    now = cuda_graphs.shards_version()
    monkeypatch.setattr(cuda_graphs, "shards_version", lambda: now + 1)
    before = call.launches
    assert torch.equal(call(prompt(3)), prompt(6)) and call.launches == before + 1
    assert call.early.wasted == 0 and call.early.taken == 2


def test_a_call_that_fails_waits_for_the_launch() -> None:
    call = Call()
    for value in range(4):
        call(prompt(value))
    with pytest.raises(ValueError, match="bad option"), call.early.prefill_of(prompt(1)):
        raise ValueError("bad option")
    assert call.early.wasted == 1
    assert torch.equal(call(prompt(9)), prompt(18))


def test_other_shapes_and_calls_within_calls() -> None:
    call = Call()
    for value in range(4):
        call(prompt(value))
    with call.early.prefill_of(torch.ones(8)), call.early.prefill_of(None):
        pass
    with call.early.prefill_of(torch.zeros(1, 3, dtype=torch.int64)):
        assert torch.equal(call(prompt(4)), prompt(8)), "the inner call launches nothing early"
    assert call.early.taken == 2 and call.early.wasted == 0
