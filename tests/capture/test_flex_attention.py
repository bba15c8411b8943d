"""FlexAttention is one node of the ATen graph."""

from __future__ import annotations

from typing import Any

import torch
from capture.capturing import Model, captured, captured_with_inputs
from helpers.graphs import targets
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from paraxis.capture import to_aten
from paraxis.compat.flex_attention import FlexAttention
from paraxis.compat.torch import is_grad_mode_switch
from paraxis.rules import rule_for


def blocks_for(x: torch.Tensor) -> Any:
    return create_block_mask(lambda b, h, q, k: q >= k, 1, None, x.shape[2], x.shape[2], device="cpu", _compile=True)


def attend(weight: torch.Tensor, x: torch.Tensor, slopes: torch.Tensor, blocks: Any) -> torch.Tensor:
    """With scores that read a tensor."""

    def score(value: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return value + slopes[head] * (q - k)

    return flex_attention(x @ weight, x, x, score, blocks)  # type: ignore[return-value]


def attention(weight: torch.Tensor, x: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """With a mask that the forward makes."""
    return attend(weight, x, slopes, blocks_for(x))


def functions(graph: Any) -> list[FlexAttention]:
    return [t for t in targets(graph) if isinstance(t, FlexAttention)]


def test_one_node_with_its_functions() -> None:
    x, slopes = torch.randn(1, 2, 6, 4), torch.randn(2)
    model = Model(attention)
    captured_graph, inputs = captured_with_inputs(model, x, slopes)
    graph = to_aten(captured_graph)
    (function,) = functions(graph)
    assert function.reads_head and rule_for(function) is not None
    assert not any(map(is_grad_mode_switch, targets(graph))), "tracing its functions left switches in the graph"
    with torch.no_grad():
        assert torch.allclose(graph(*inputs)[0], attention(model.weight, x, slopes), atol=1e-6)


def test_one_node_inside_activation_checkpointing() -> None:
    x, slopes = torch.randn(1, 2, 6, 4, requires_grad=True), torch.randn(2)

    def recomputed(weight: torch.Tensor, *args: Any) -> Any:
        return checkpoint(attend, weight, *args, blocks_for(args[0]), use_reentrant=False)

    assert len(functions(to_aten(captured(Model(recomputed), x, slopes)))) == 1
