"""Decomposing captured graphs into ATen operators, with provenance."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from capture.capturing import Model, aten_of, captured, names, node_of
from helpers.graphs import targets
from torch import nn

from paraxis.capture import simplify, to_aten
from paraxis.rules import rule_for

aten = torch.ops.aten


def test_layers_are_not_decomposed() -> None:
    def function(w: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = F.linear(F.layer_norm(x, (4,)), w).view(1, 2, 3, 4)
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
        h = F.silu(F.gelu(F.rms_norm(h, (4,)))).softmax(-1)
        return F.cross_entropy(h.view(6, 4), labels)

    found = names(aten_of(function, torch.ones(6, 4), torch.zeros(6, dtype=torch.long)))
    for name in ("linear", "layer_norm", "rms_norm", "scaled_dot_product_attention", "silu", "gelu", "softmax"):
        assert found.count(name) == 1, (name, found)
    assert found.count("cross_entropy_loss") == 1


def test_embedding_and_matmul_are_not_decomposed() -> None:
    def function(w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, w) @ w

    assert names(aten_of(function, torch.zeros(2, 3, dtype=torch.long))) == ["embedding", "matmul"]


def test_gradients_stop_where_the_model_stops_them() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).detach() * w + F.linear(x, w).data

    assert names(aten_of(function, torch.ones(4, 4))).count("detach") == 2


def test_other_functions_are_decomposed() -> None:
    found = targets(aten_of(lambda w, x: F.hardswish(x) + torch.addcdiv(x, w, w + 1), torch.ones(4, 4)))
    assert all(isinstance(t, torch._ops.OpOverload) for t in found)
    assert aten.hardswish.default not in found or rule_for(aten.hardswish.default) is not None
    assert all(rule_for(t) is not None for t in found)


def test_a_function_that_somebody_has_patched_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch is part of the captured graph; what it calls is torch's own."""
    own = F.silu
    monkeypatch.setattr(F, "silu", lambda x: own(x) * 2)
    found = names(aten_of(lambda w, x: F.silu(x), torch.ones(4, 4)))
    assert found == ["silu", "mul"] and F.silu is not own


def test_placeholders_keep_their_order() -> None:
    graph = captured(Model(lambda w, x, y: x @ w + y), torch.ones(4, 4), torch.ones(4))
    before = [n for n in graph.graph.nodes if n.op == "placeholder"]
    after = [n for n in to_aten(graph).graph.nodes if n.op == "placeholder"]
    assert [n.meta["origin"] for n in after] == before


def test_every_node_knows_where_it_came_from() -> None:
    graph = captured(Model(lambda w, x: F.linear(torch.relu(x), w).view(2, 2, 4).softmax(-1)), torch.ones(4, 4))
    result = to_aten(graph)
    own = set(graph.graph.nodes)
    for node in result.graph.nodes:
        if node.op in ("placeholder", "call_function"):
            assert node.meta["origin"] in own, node
    origin = node_of(result, aten.linear.default).meta["origin"]
    assert "linear" in str(origin.target)
    assert "F.linear" in origin.meta["stack_trace"] or "linear" in str(origin.meta.get("stack_trace"))


def test_the_module_of_a_node_is_known() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    result = to_aten(captured(Outer(), torch.ones(2, 4)))
    stack = node_of(result, aten.linear.default).meta["origin"].meta["nn_module_stack"]
    assert "inner" in str(list(stack.values())[-1])


def test_graph_computes_the_same() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        y += 1
        y = y[:, [1, 2]]
        return F.dropout(y, 0.5, False).cumsum(0)

    x = torch.randn(4, 4)
    graph = captured(Model(function), x)
    inputs = [x if n.meta["example_value"].shape == x.shape and "weight" not in n.name else torch.ones(4, 4)
              for n in graph.graph.nodes if n.op == "placeholder"]  # fmt: skip
    (result,) = simplify(to_aten(graph))(*inputs)
    assert torch.allclose(result, function(torch.ones(4, 4), x))
