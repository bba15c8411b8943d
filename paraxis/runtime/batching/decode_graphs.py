"""Decode steps of a batch as CUDA graphs: one for each number of sequences, rounded up.

The first steps of a size run the model, which compiles its program; the next one is captured. A replay does not look at
the model: graphs are dropped when somebody registers a hook or a module, replaces a shard, or when a prefill, which
does look, has compiled the model again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat.paged_attention import PagedStep
from ..generation.step_graph import CapturedStep
from .device_step import DecodeBuffers
from .paged_cache import PagedCache
from .step import Step

STEPS_BEFORE = 3
"""Steps of a size that run the model before one is captured: a program runs eagerly, is compiled, and warms up."""

Forward = Callable[[PagedStep, Tensor, Tensor, Tensor], Tensor]
"""The logits of some rows, from a step, token ids, positions and the rows."""


def rounded(count: int) -> int:
    """The size of the step for so many sequences: powers of two, then multiples of 16."""
    return 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16


@dataclass
class _Size:
    """What there is for steps of one size: buffers, how many steps have run, and the graph of one."""

    buffers: DecodeBuffers
    steps: int = 0
    graph: CapturedStep | None = None


class DecodeGraphs:
    """Runs decode steps on a GPU.

    Args:
        cache: The paged KV cache.
        forward: Runs the model.
        columns: The most blocks of a sequence.
        seen: A value that changes when somebody changes the model.
        capturable: Whether a step is one program, which a graph can stand for.
        pool: The memory pool of the graphs.
        device: The GPU.
    """

    def __init__(
        self,
        cache: PagedCache,
        forward: Forward,
        columns: int,
        seen: Callable[[], Any],
        capturable: Callable[[], bool],
        pool: Any,
        device: torch.device,
    ) -> None:
        self.cache, self.forward, self.columns = cache, forward, columns
        self.seen, self.capturable, self.pool, self.device = seen, capturable, pool, device
        self._sizes: dict[int, _Size] = {}
        self._last: Any = None
        self._enabled = True

    def run(self, step: Step) -> Tensor | None:
        """The logits of a step, until the next one; None if it is not a decode step."""
        count = len(step.sequences)
        if len(step.ids) != count or len(step.rows) != count:
            return None
        size = rounded(count)
        state = self._sizes.get(size)
        if state is None:
            state = self._sizes[size] = _Size(DecodeBuffers(self.cache, size, self.columns, self.device))
        if (seen := self.seen()) != self._last:
            for each in self._sizes.values():
                each.graph, each.steps = None, 0
            self._last = seen
        state.buffers.fill(step)
        if state.graph is None and self._enabled and state.steps >= STEPS_BEFORE and self.capturable():
            self._capture(state)
        if state.graph is not None:
            state.graph.replay()
            return state.graph.results[:count]  # type: ignore[no-any-return]
        state.steps += 1
        return self._run(state)[:count]

    def _run(self, state: _Size) -> Tensor:
        buffers = state.buffers
        step = buffers.step()
        logits = self.forward(step, buffers.ids, buffers.positions, buffers.rows)
        step.check_complete()
        return logits

    def _capture(self, state: _Size) -> None:
        """All ranks capture the same steps: they go by what has run, and not by what is in memory."""
        try:
            state.graph = CapturedStep(lambda: self._run(state), self.pool)
        except RuntimeError as error:
            self._enabled = False
            logging.getLogger("paraxis").warning("decode steps of batches are no CUDA graphs: %s", error)
