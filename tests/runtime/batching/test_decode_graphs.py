"""When decode steps of a batch are captured as CUDA graphs, and when graphs are dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime.batching.test_device_step import mixed, request

from paraxis.runtime.batching import decode_graphs
from paraxis.runtime.batching.decode_graphs import STEPS_BEFORE, DecodeGraphs, rounded
from paraxis.runtime.batching.paged_cache import PagedCache
from paraxis.runtime.batching.scheduler import Part
from paraxis.runtime.batching.step import Step

CPU = torch.device("cpu")


class Capture:
    """In place of a CUDA graph: a replay computes the logits again."""

    made = 0

    def __init__(self, step: Any, pool: Any) -> None:
        Capture.made += 1
        self.step, self.results = step, step()

    def replay(self) -> None:
        self.results.copy_(self.step())


def decode(count: int, token: int = 6) -> Step:
    return Step.of([Part(request(str(i), token, token - 1, [i, 7]), 1) for i in range(count)])


def test_sizes_are_rounded_up() -> None:
    assert [rounded(n) for n in (1, 2, 3, 5, 9, 16, 17, 33, 100)] == [1, 2, 4, 8, 16, 16, 32, 48, 112]


def test_steps_are_captured_when_they_repeat_and_the_model_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "CapturedStep", Capture)
    calls, seen, one_program = [], [0], [True]

    def forward(step: Any, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(ids))
        return torch.stack([ids.float(), positions.float()], 1)

    graphs = DecodeGraphs(
        PagedCache([], 8, 4, CPU), forward, 3, lambda: seen[0], lambda: one_program[0], None, CPU
    )  # fmt: skip
    assert graphs.run(mixed()) is None and not calls
    Capture.made = 0
    for _ in range(STEPS_BEFORE):
        assert graphs.run(decode(3)).tolist() == [[6.0, 5.0]] * 3  # type: ignore[union-attr]
    assert calls == [4] * STEPS_BEFORE and Capture.made == 0
    graphs.run(decode(3))
    assert Capture.made == 1
    assert graphs.run(decode(4, 5)).tolist() == [[5.0, 4.0]] * 4  # type: ignore[union-attr]  # another step, one graph
    assert Capture.made == 1
    seen[0] = 1
    graphs.run(decode(4))
    assert graphs._sizes[4].graph is None
    one_program[0] = False
    for _ in range(2 * STEPS_BEFORE):
        graphs.run(decode(4))
    assert Capture.made == 1
