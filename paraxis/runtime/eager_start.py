"""A compiled program whose first run is by Python: the first tokens do not wait for a compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch


class StartsEagerly:
    """Runs by Python at first, and compiled from the second run on.

    Most programs of a process run many times, but the first answer is waited for, and some programs never run again.

    Args:
        by_python: The program as it runs at first.
        compiling: Compiles it: called once, by all ranks in the same run. It raises, on all of them, where that cannot
            be; the program then runs by Python from there on.
    """

    def __init__(self, by_python: Callable[..., Any], compiling: Callable[[], Callable[..., Any]]) -> None:
        self.program, self._compiling = by_python, compiling
        self._runs = 0

    @property
    def ready(self) -> bool:
        """Whether it will run as it has run before, so that it can be captured as a CUDA graph."""
        return self._runs > 1

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        if self._runs == 1:
            try:
                self.program = self._compiling()
            except Exception as error:
                logging.getLogger("paraxis").debug("not compiled", exc_info=error)  # who compiles has said why
        result = self.program(*args)
        self._runs += 1
        return result


def has_fixed_sizes(examples: Sequence[Any]) -> bool:
    """Whether no size among example inputs is symbolic. A compiler puts conditions on symbolic sizes, which are
    guarded only if it does so while the graph is captured."""
    return not any(
        isinstance(x, torch.SymInt)
        or (isinstance(x, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride())))
        for x in examples
    )
