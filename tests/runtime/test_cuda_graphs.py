"""What is copied before and after a replay, when a program is captured, and how long graphs and pools live.

A fake CUDA graph stands in for the real one, which needs a GPU: see ``kernels/`` and ``models/test_cuda.py`` for that.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paraxis.runtime import cuda_graphs
from paraxis.runtime.cuda_graphs import LIVE_GRAPHS, CUDAGraphReplay, CUDAGraphRunner, on_device, pool_of


class Program:
    """Writes the token into the cache and returns token + weight, the cache and a step counter plus one.

    It notes its arguments and results when it is captured, so that a fake graph can run it again on the same memory.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, weight: torch.Tensor, cache: torch.Tensor, token: torch.Tensor, *scalars: torch.Tensor) -> Any:
        self.calls += 1
        self.arguments = (weight, cache, token, *scalars)
        cache[int(scalars[0]) if scalars else 0] = token
        self.results = [token + weight, cache, *(x + 1 for x in scalars)]
        return self.results


class FakeGraph:
    """Runs the captured program again, into the results that it had."""

    current: Program
    """What is captured next."""

    def __init__(self) -> None:
        self.program, self.seen = FakeGraph.current, []
        self.pool: Any = None

    def replay(self) -> None:
        weight, cache, token, *scalars = self.arguments
        self.seen.append(([int(x) for x in scalars], [x._version for x in scalars]))
        cache[int(scalars[0]) if scalars else 0] = token
        for result, value in zip(self.results, [token + weight, cache, *(x + 1 for x in scalars)], strict=True):
            if result is not cache:
                result.copy_(value)


@contextmanager
def fake_capture(graph: FakeGraph, pool: Any, capture_error_mode: str) -> Iterator[None]:
    """In place of ``torch.cuda.graph``."""
    assert capture_error_mode == "thread_local"
    yield
    graph.arguments, graph.results, graph.pool = graph.program.arguments, graph.program.results, pool


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)


def runner_of(scalars: int = 0) -> tuple[CUDAGraphRunner, Program]:
    """A runner of a new program with a cache to write to and this many scalars."""
    FakeGraph.current = program = Program()
    return CUDAGraphRunner(program, [0], list(range(2, 2 + scalars)), object()), program


def token(value: float) -> torch.Tensor:
    return torch.full((4,), value)


def test_second_call_with_the_same_cache_captures() -> None:
    runner, program = runner_of()
    weight, cache = torch.ones(4), torch.zeros(3, 4)
    for step in range(5):
        result, written = runner([weight], [cache, token(step)])
        assert torch.equal(result, token(step) + 1) and written is cache and torch.equal(cache[0], token(step))
    assert len(runner.graphs) == 1 and program.calls == 2, "run once, captured once, then replayed"
    assert runner.graphs[0].graph.pool is runner.pool and len(runner.graphs[0].graph.seen) == 4


def test_results_are_copies() -> None:
    """What a caller holds on to does not change with the next replay."""
    runner, _ = runner_of()
    weight, cache = torch.ones(4), torch.zeros(3, 4)
    results = [runner([weight], [cache, token(step)])[0] for step in range(4)]
    assert [float(x[0]) for x in results] == [1, 2, 3, 4]


def test_other_caches_and_moved_weights_are_not_replayed() -> None:
    runner, program = runner_of()
    weight, caches = torch.ones(4), [torch.zeros(3, 4) for _ in range(2)]
    for cache in (caches[0], caches[0], caches[1], caches[1], caches[0]):
        runner([weight], [cache, token(5)])
        assert torch.equal(cache[0], token(5))
    assert len(runner.graphs) == 2 and program.calls == 4
    moved = weight.clone() * 2
    assert torch.equal(runner([moved], [caches[0], token(1)])[0], token(3)), "the weight has another address"


def test_scalars_are_copied_when_they_change() -> None:
    """Counters that are updated in place: what was copied before must not change with them."""
    runner, _ = runner_of(scalars=2)
    weight, cache, counters = torch.ones(4), torch.zeros(8, 4), [torch.tensor(0), torch.tensor(0)]
    steps = ((0, 0), (0, 0), (0, 0), (5, 0), (5, 0), (0, 0))
    for values in steps:
        for counter, value in zip(counters, values, strict=True):
            counter.fill_(value)
        results = runner([weight], [cache, token(1), *counters])
        assert [int(x) for x in results[2:]] == [value + 1 for value in values]
    seen = runner.graphs[0].graph.seen
    assert [tuple(values) for values, _ in seen] == list(steps[1:])
    versions = [version for _, (version, _) in seen]
    assert [v - versions[0] for v in versions] == [0, 0, 1, 1, 2], "written only when they change"


def test_graphs_of_dead_caches_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    runner = CUDAGraphRunner(lambda weight, cache, x: [x + weight], [0], [], object())
    weight = torch.ones(4)
    for _ in range(2 * LIVE_GRAPHS):
        cache = torch.zeros(3, 4)
        for step in range(2):
            runner([weight], [cache, token(step)])
    assert len(runner.graphs) == 1, "all other caches are gone"
    caches = [torch.zeros(3, 4) for _ in range(2 * LIVE_GRAPHS)]
    for cache in caches:
        for step in range(2):
            runner([weight], [cache, token(step)])
    assert len(runner.graphs) == LIVE_GRAPHS


def test_results_in_the_memory_of_a_copied_input_are_refused() -> None:
    with pytest.raises(ValueError, match="the memory of an input that changes"):
        FakeGraph.current = SimpleNamespace(arguments=(), results=[])  # type: ignore[assignment]
        CUDAGraphReplay(lambda weight, cache, x: [x.view(2, 2)], [torch.ones(4)], [token(0), token(1)], [0], [], None)


def test_programs_that_cannot_be_captured_run() -> None:
    runner, program = runner_of()

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    weight, cache = torch.ones(4), torch.zeros(3, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph", failing)
        for step in range(4):
            assert torch.equal(runner([weight], [cache, token(step)])[0], token(step) + 1)
    assert not runner.capturable and not runner.graphs and program.calls == 4


def test_inputs_on_another_device_are_not_captured() -> None:
    runner = CUDAGraphRunner(lambda weight, cache, x: [cache], [0], [], object())
    cache, elsewhere = torch.zeros(3, 4), torch.empty(4, device="meta")
    for _ in range(3):
        runner([torch.ones(4)], [cache, elsewhere])
    assert not runner.capturable and not runner.graphs


def test_scalars_are_moved_together() -> None:
    inputs = [torch.ones(2), torch.tensor(3), torch.tensor(4)]
    assert on_device(inputs, [], None) is inputs
    moved = on_device(inputs, [1, 2], torch.device("cpu"))
    assert moved[0] is inputs[0] and [int(x) for x in moved[1:]] == [3, 4]
    assert moved[1].untyped_storage().data_ptr() == moved[2].untyped_storage().data_ptr(), "one copy"


class Context:
    """As much of a ``ParallelExecutionCtx`` as a pool needs."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(graph_pool=None)


def test_pools_belong_to_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        pass

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", Pool)
    one, other = Context(), Context()
    pool = pool_of(one)  # type: ignore[arg-type]
    assert pool_of(one) is pool and pool_of(other) is not pool  # type: ignore[arg-type]
    alive = weakref.ref(pool)
    del pool, one
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_copies_have_their_own_memory(dtype: torch.dtype) -> None:
    for count in (1, 3):
        tensors = [torch.ones(2, dtype=dtype) for _ in range(count)]
        copies = cuda_graphs._copies(tensors)
        for x, copy in zip(tensors, copies, strict=True):
            assert torch.equal(x, copy) and x.dtype == copy.dtype and x.data_ptr() != copy.data_ptr()
