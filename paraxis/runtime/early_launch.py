"""The prefill of a repeated ``generate`` starts before the host has prepared it.

The host takes longer to prepare a call of ``generate`` (to fill in its configuration, to make a KV cache, to check that
the program still fits) than a small model's prefill takes on a GPU. If an earlier call with a prompt of this shape
replayed a CUDA graph, that graph is launched at once, on a stream of its own. The call then goes its usual way; where
it would replay a graph, it takes the results of that launch: if it is the same graph, and all its inputs have the same
values. Otherwise the launch was for nothing, which nobody notices but the clock.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .cuda_graphs import CUDAGraphReplay

MAX_WRONG = 2
"""After so many launches for nothing, prompts of a shape are not launched early any more."""
MAX_KNOWN = 64
"""Shapes of prompts to remember."""


class EarlyLaunches:
    """The early launches of one model's prefills.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.taken = self.wasted = 0
        """How many launches were of use, and how many were not."""
        self._known: dict[Any, tuple[weakref.ref[CUDAGraphReplay], int]] = {}
        self._wrong: dict[Any, int] = {}
        self._prompt: torch.Tensor | None = None
        self._first = False  # whether no graph has run in this call
        self._pending: CUDAGraphReplay | None = None
        self._done: Any = None
        self._stream: Any = None

    # -- around a call of generate -----------------------------------------------------------------------------

    @contextmanager
    def prefill_of(self, prompt: Any) -> Iterator[None]:
        """Inside, ``generate`` runs on this prompt: its prefill is launched, if such a one is known."""
        if self._prompt is not None or not _is_prompt(prompt, self.device):
            yield
            return
        self._prompt, self._first = prompt, True
        try:
            self._launch(prompt)
            yield
        finally:
            self.settle()
            self._prompt = None

    def _launch(self, prompt: torch.Tensor) -> None:
        graph, position = self._find(tuple(prompt.shape))
        if graph is None or not graph.launchable():
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)  # the prompt, and all graphs that share memory with this one
        with torch.cuda.stream(self._stream):
            graph.put(position, prompt)
            copied = self._stream.record_event()
            graph.launch()
            self._done = self._stream.record_event()
        here.wait_event(copied)
        self._pending = graph

    def _find(self, shape: tuple[int, ...]) -> tuple[CUDAGraphReplay | None, int]:
        found = self._known.get(shape)
        return (None, 0) if found is None else (found[0](), found[1])

    # -- where a graph is replayed -------------------------------------------------------------------------------

    def take(self, graph: CUDAGraphReplay, inputs: list[Any], writes: bool = False) -> bool:
        """Whether this graph was launched early on these inputs: then its results are there for what is launched
        next. If not, no early launch is running any more. ``writes``: whether the graph writes to its inputs."""
        if self._prompt is None or not self._first:
            return False
        self._first = False
        if self._pending is None:
            if not writes:
                self._learn(graph, inputs)
            return False
        same = self._pending is graph and graph.has(inputs)  # looks at inputs alone: the graph may be running
        if same:
            self._pending = None
            self.taken += 1
            torch.cuda.current_stream(self.device).wait_event(self._done)
        self.settle()
        return same

    def settle(self) -> None:
        """Before anything else runs: what is launched next waits for a launch that was for nothing."""
        if self._pending is None or self._prompt is None:
            return
        self._pending = None
        self.wasted += 1
        torch.cuda.current_stream(self.device).wait_event(self._done)
        shape = tuple(self._prompt.shape)
        self._wrong[shape] = self._wrong.get(shape, 0) + 1
        self._known.pop(shape, None)

    def _learn(self, graph: CUDAGraphReplay, inputs: list[Any]) -> None:
        """Remember the first graph of the call, if the prompt is among its inputs."""
        prompt = self._prompt
        assert prompt is not None
        shape = tuple(prompt.shape)
        known, _ = self._find(shape)
        if known is graph or self._wrong.get(shape, 0) >= MAX_WRONG:
            return
        position = graph.position_of(prompt, inputs)
        if position is not None:
            while len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[shape] = weakref.ref(graph), position


def _is_prompt(prompt: Any, device: torch.device) -> bool:
    return isinstance(prompt, torch.Tensor) and prompt.dim() == 2 and prompt.device.type == device.type
