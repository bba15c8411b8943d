"""The generation loop on CPU ranks, where it does not run by default, against transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from paraxis.runtime.generation import cache_sizes, install, loop


@contextmanager
def generation_loop(capacity: int = 32) -> Iterator[list[Any]]:
    """Inside, models generate by the loop, with caches of at least this capacity; the loops that have run."""
    runs: list[Any] = []
    run = loop.GenerationLoop.run

    def noted(self: Any) -> Any:
        runs.append(self)
        return run(self)

    with (
        patch.object(install, "fast_generation", lambda *args: True),
        patch.object(cache_sizes, "FIRST_CAPACITY", capacity),
        patch.object(loop.GenerationLoop, "run", noted),
    ):
        yield runs


class Pushed:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def seeded(function: Any, seed: int = 3) -> tuple[Any, float]:
    """The result of a function with this seed, and what is drawn after it."""
    torch.manual_seed(seed)
    return function(), float(torch.rand(()))
