"""The host sees what every step has written, in order, and steps that were never looked at are left out."""

from __future__ import annotations

import pytest
import torch

from paraxis.runtime.generation.late_look import LateLook


def signals(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_steps_are_seen_in_order(device: str) -> None:
    look = LateLook(2, torch.device(device))
    written = signals(5, 6, 1, 0).to(device)
    look.send(written)
    written.copy_(signals(7, 8, 0, 1))
    look.send(written)
    assert look.waiting == 2
    first, second = look.receive(), look.receive()
    assert first.tokens.tolist() == [5, 6] and not first.stopped and not first.invalid
    assert second.tokens.tolist() == [7, 8] and second.stopped and second.invalid
    assert first.tokens.tolist() == [5, 6], "tokens are copies"


def test_forgotten_steps_are_not_seen() -> None:
    look = LateLook(1, torch.device("cpu"))
    for value in (1, 2):
        look.send(signals(value, 1, 0))
    look.receive()
    look.forget()
    assert look.waiting == 0
    look.send(signals(3, 1, 0))
    assert look.receive().tokens.tolist() == [3]
