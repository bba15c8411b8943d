"""Capturing a graph with Dynamo, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capture.capturing import Model, captured
from torch import nn
from torch.fx import GraphModule

from paraxis.capture import CaptureError, capture


class _DataDependent(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:  # the line to blame
            return x
        return -x


def test_capture_error_names_the_line() -> None:
    with pytest.raises(CaptureError) as caught:
        captured(_DataDependent(), torch.ones(2))
    message = str(caught.value)
    assert "_DataDependent" in message and "test_trace.py:" in message
    assert "if x.sum().item() > 0" in message
    assert "data-dependent" in message


def test_errors_of_the_callback_are_raised() -> None:
    def consume(graph: GraphModule, inputs: list[Any]) -> None:
        raise ValueError("sizes that do not divide")

    with pytest.raises(ValueError, match="sizes that do not divide"):
        capture(Model(lambda w, x: x @ w), (torch.ones(4, 4),), {}, consume)
    torch._dynamo.reset()


def test_capture_does_not_run_the_model() -> None:
    model = Model(lambda w, x: x @ w)
    graph = captured(model, torch.full((4, 4), float("nan")))
    assert isinstance(graph, GraphModule)
