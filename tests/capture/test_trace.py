"""Capturing a graph with Dynamo, and its errors."""

from __future__ import annotations

import gc
import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from capture.capturing import Model, captured
from torch import nn
from torch.fx import GraphModule

from paraxis.capture import CaptureError, capture, trace
from paraxis.errors import GraphBreak
from paraxis.runtime.guards import all_guards


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


_logger = logging.getLogger("model")


class _Loud(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _logger.warning("inside of a forward")
        return x + 1


def test_logger_calls_do_not_break_the_graph() -> None:
    assert captured(_Loud(), torch.ones(2)) is not None
    assert logging.Logger.warning in torch._dynamo.config.ignore_logging_functions


def _switches() -> tuple[bool, bool]:
    return gc.isenabled(), torch.backends.mha.get_fastpath_enabled()


def test_warnings_do_not_break_the_graph() -> None:
    def warns(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("slow", DeprecationWarning, stacklevel=2)
        return x @ weight

    captured(Model(warns), torch.ones(2, 4))


def test_errors_of_the_model_itself_are_named() -> None:
    def fails(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("a length of 3 is not even")

    with pytest.raises(CaptureError, match="a length of 3 is not even"):
        captured(Model(fails), torch.ones(2, 4))


def test_switches_are_off_while_tracing_alone() -> None:
    """Garbage collection and the fused encoder layer: off while Dynamo traces, on again whatever happens then."""
    seen = []
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad():
        capture(encoder, (torch.ones(1, 3, 16),), {}, lambda graph, _: seen.append((_switches(), graph)))
    ((during, graph),) = seen
    assert during == (False, False) and _switches() == (True, True)
    assert "_transformer_encoder_layer_fwd" not in str(graph.graph)
    with pytest.raises(CaptureError):
        captured(_DataDependent(), torch.ones(2))
    assert _switches() == (True, True)
    torch._dynamo.reset()


def test_compiled_calls_leave_the_switches_alone() -> None:
    """A cache hit runs under the caller's settings, though it was traced under others."""
    graphs, during = [], []

    def backend(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)

        def run(*args: Any) -> Any:
            during.append(_switches())
            return graph(*args)

        return run

    compiled = torch.compile(
        trace.fresh_entry(gather_outputs=False),
        backend=backend,
        fullgraph=True,
        options={"guard_filter_fn": all_guards},
    )
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad():
        for _ in range(3):
            compiled(encoder, torch.ones(1, 3, 16))
            trace.end_tracing()
    assert len(graphs) == 1 and during == [(False, False), (True, True), (True, True)]


def test_threads_that_trace_at_the_same_time() -> None:
    """The last one to end turns the switches on again."""
    with ThreadPoolExecutor(1) as other:
        other.submit(trace.begin_tracing).result()
        trace.begin_tracing()
        assert _switches() == (False, False)
        other.submit(trace.end_tracing).result()
        assert _switches() == (False, False)
        trace.end_tracing()
        trace.end_tracing()
    assert _switches() == (True, True)


class _SplitByValue(nn.Module):
    """Sizes that are values of an input: Dynamo raises an error of symbolic shapes, and none of its own."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.cat([part * part.shape[0] for part in torch.split(x, lengths.tolist()) if part.shape[0]])


def test_sizes_that_are_values_break_the_graph() -> None:
    with pytest.raises(GraphBreak, match="_SplitByValue cannot be captured as one graph.*lengths.tolist"):
        capture(_SplitByValue(), (torch.randn(5, 2), torch.tensor([2, 3])), {}, lambda graph, inputs: None)


class _IndexesByScalars(nn.Module):
    """Tuples of scalar tensors as indices: torch reads their data to make one index, also of fake tensors."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        rows, columns = zip(*index, strict=True)
        mask[rows, columns] = False
        return x * mask.unsqueeze(-1)


def test_operators_that_read_data_break_the_graph() -> None:
    """Dynamo calls this a runtime error, as it does a mistake of the model, but the model runs."""
    inputs = torch.randn(2, 3, 4), torch.tensor([[0, 1], [1, 2]])
    assert not bool(_IndexesByScalars()(*inputs)[0, 1].any())
    with pytest.raises(GraphBreak, match="_IndexesByScalars cannot be captured as one graph.*rows, columns"):
        capture(_IndexesByScalars(), inputs, {}, lambda graph, inputs: None)
