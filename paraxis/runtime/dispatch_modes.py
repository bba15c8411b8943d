"""Dispatch modes of the caller: what counts operators or measures memory while a model runs.

The compiler gives up where such a mode is active, and the model would run in Python. So modes are set aside while it
looks for its program, and are there again while the program runs: they see the operators of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

_aside: list[TorchDispatchMode] = []


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Inside, the caller's modes are not active, but for programs of :func:`with_dispatch_modes`."""
    modes = _get_current_dispatch_mode_stack()
    if not modes or any(type(mode).is_infra_mode() for mode in modes):  # torch's own are part of how it works
        yield
        return
    before = list(_aside)
    _aside[:] = modes
    try:
        with _disable_current_modes():
            yield
    finally:
        _aside[:] = before


def with_dispatch_modes(program: Callable[..., Any]) -> Callable[..., Any]:
    """A program that runs under the modes that were set aside for it."""

    def run(*args: Any) -> Any:
        if not _aside:
            return program(*args)
        with ExitStack() as stack:
            modes, _aside[:] = list(_aside), []
            stack.callback(_aside.extend, modes)
            for mode in modes:
                stack.enter_context(mode)
            return program(*args)

    return run
