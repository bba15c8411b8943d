"""``vmap`` inside a model."""

from __future__ import annotations

import torch
from capture.capturing import captured_with_inputs
from torch import nn

from paraxis.capture import simplify, to_aten
from paraxis.capture.vmap import find_sections


class Mapped(nn.Module):
    """``vmap`` over a function of the module's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: (self.weight @ row).tanh().cumsum(0))(x)


def test_vmap_becomes_plain_operators() -> None:
    torch.manual_seed(0)
    module, x = Mapped(), torch.randn(3, 4)
    graph, inputs = captured_with_inputs(module, x)
    aten = simplify(to_aten(graph))
    assert not any("batch_dim" in str(n.target) or "vmap" in str(n.target) for n in aten.graph.nodes)
    (result,) = aten(*inputs)
    assert torch.allclose(result, module(x), atol=1e-6)


def test_a_graph_without_vmap_has_no_sections() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    assert find_sections(graph) == {}


def test_inputs_and_outputs_of_a_section() -> None:
    graph, _ = captured_with_inputs(Mapped(), torch.randn(3, 4))
    sections = set(find_sections(graph.graph).values())
    assert len(sections) == 1
    (section,) = sections
    inside = set(section.nodes)
    assert section.inputs() and not inside & set(section.inputs())
    assert section.outputs() and set(section.outputs()) <= inside
