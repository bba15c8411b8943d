"""What a recording is given before it is replayed. Recordings need a GPU: see ``kernels/test_decoding.py``."""

from __future__ import annotations

from typing import Any

import torch

from paraxis.runtime.cuda_graphs import CUDAGraphReplay


class Replayed:
    """In place of a CUDA graph: what the numbers were when it ran, and how often they were written before."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.seen = numbers, []

    def replay(self) -> None:
        self.seen.append((self.numbers.tolist(), self.numbers._version))


def test_counters_are_copied_when_they_change() -> None:
    recording: Any = object.__new__(CUDAGraphReplay)
    recording.single, recording.copies, recording.together = [], {}, [0, 1]
    recording.numbers, recording.filled = torch.full((2,), -1), None
    recording.results, recording.leaving = [], []
    recording.graph = Replayed(recording.numbers)
    counters = [torch.tensor(0), torch.tensor(0)]
    for numbers in ((0, 0), (0, 0), (5, 0), (5, 0), (0, 0)):
        for counter, number in zip(counters, numbers, strict=True):
            counter.fill_(number)  # counted on in place: what was copied before must not change with them
        recording.replay(counters)
    assert [numbers for numbers, _ in recording.graph.seen] == [[0, 0], [0, 0], [5, 0], [5, 0], [0, 0]]
    assert [version for _, version in recording.graph.seen] == [1, 1, 2, 2, 3]
