"""Dispatch modes of the caller (a FLOP counter, a memory tracker) around a compiled call.

Dynamo does not compile where a ``TorchDispatchMode`` is active, and the model would run in eager mode. So the caller's
modes are disabled while Dynamo looks up or compiles the program, and active again while the program runs: they see the
operators of this rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..compat.torch import TorchDispatchMode, current_dispatch_modes, disable_dispatch_modes


class _Disabled(threading.local):
    """The modes of this thread's caller that are disabled now, the outermost first."""

    def __init__(self) -> None:
        self.modes: list[TorchDispatchMode] = []


_disabled = _Disabled()


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Disable the caller's modes, except for programs of :func:`with_dispatch_modes`."""
    modes = current_dispatch_modes()
    if not modes or any(type(mode).is_infra_mode() for mode in modes):  # torch's own are part of how it works
        yield
        return
    before, _disabled.modes = _disabled.modes, modes
    try:
        with disable_dispatch_modes():
            yield
    finally:
        _disabled.modes = before


def with_dispatch_modes(program: Callable[..., Any]) -> Callable[..., Any]:
    """A program that runs under the modes that :func:`without_dispatch_modes` has disabled."""

    def run(*args: Any) -> Any:
        modes = _disabled.modes
        if not modes:
            return program(*args)
        _disabled.modes = []
        try:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return program(*args)
        finally:
            _disabled.modes = modes

    return run
