"""Who wants to know of the runs of compiled programs.

A step that is captured as one CUDA graph replays what its program did, without the guards around it and without the
program's own checks. So whoever captures one must know which program ran, and on which memory: :class:`ProgramRun`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Program = Callable[..., Any]
Observer = Callable[[Program, list[torch.Tensor], list[Any]], Any]
"""Gets a program, the shards and the inputs that it is to run with, and returns its results: see :func:`execute`."""

_observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Inside, compiled programs without gradients are run by this observer."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


def observer() -> Observer | None:
    """The innermost observer."""
    return _observers[-1] if _observers else None


def execute(program: Program, shards: list[torch.Tensor], inputs: list[Any]) -> Any:
    """Run a program, for an observer."""
    return program(*shards, *inputs)


class ProgramRun:
    """Which program has run, and on which objects at which addresses. Keeps none of them alive."""

    def __init__(self, program: Program, shards: Sequence[torch.Tensor], inputs: Sequence[Any]) -> None:
        self._program = weakref.ref(program)
        self._inputs = [weakref.ref(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        self._addresses = _addresses((*shards, *inputs))

    def is_again(self, program: Program, shards: Sequence[torch.Tensor], inputs: Sequence[Any]) -> bool:
        """Whether a run would be the same: the program, the numbers among its inputs, the tensors and their memory."""
        if self._program() is not program or len(inputs) != len(self._inputs):
            return False
        for known, value in zip(self._inputs, inputs, strict=True):
            if isinstance(known, weakref.ref):
                if known() is not value:
                    return False
            elif isinstance(value, torch.Tensor) or known != value:
                return False
        return self._addresses == _addresses((*shards, *inputs))


def _addresses(values: Sequence[Any]) -> list[int]:
    return [x.data_ptr() for x in values if isinstance(x, torch.Tensor)]
