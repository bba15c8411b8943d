"""Modes of the caller are active while a program runs, and not around it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from paraxis.runtime.dispatch_modes import with_dispatch_modes, without_dispatch_modes


class Seen(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def active() -> int:
    return len(_get_current_dispatch_mode_stack())


def test_modes_see_the_program_alone() -> None:
    program = with_dispatch_modes(lambda x: x + 1)
    with Seen() as outer, Seen() as inner:
        with without_dispatch_modes():
            assert active() == 0
            x = torch.ones(2) * 3
            assert torch.equal(program(x), torch.full((2,), 4.0))
            assert active() == 0
        assert active() == 2
    assert outer.operators == inner.operators == ["aten.add.Tensor"]
    assert torch.equal(program(torch.ones(2)), torch.full((2,), 2.0)), "without modes"


def test_modes_are_back_after_an_error() -> None:
    def failing() -> None:
        raise ValueError

    with FlopCounterMode(display=False):
        for _ in range(2):
            with without_dispatch_modes(), pytest.raises(ValueError):
                with_dispatch_modes(failing)()
            assert active() == 1
    assert active() == 0


def test_programs_inside_of_programs() -> None:
    """A module that falls back calls compiled children from its own Python forward."""
    inner = with_dispatch_modes(lambda x: x * 2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with without_dispatch_modes():
            return inner(x) + 1

    with Seen() as seen, without_dispatch_modes():
        with_dispatch_modes(forward)(torch.ones(2))
    assert seen.operators == ["aten.mul.Tensor"]


def test_modes_of_other_threads() -> None:
    program = with_dispatch_modes(lambda x: (x + 1, active()))
    with ThreadPoolExecutor(1) as other, Seen() as seen, without_dispatch_modes():
        assert other.submit(program, torch.ones(2)).result()[1] == 0
        assert program(torch.ones(2))[1] == 1
    assert seen.operators == ["aten.add.Tensor"]
