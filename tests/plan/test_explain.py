"""Explanations of a plan: placements, alternatives and their costs, in the names of the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from solver.programs import Transformer
from torch import nn

from paraxis.plan.explain import Explanation, explain_planned
from paraxis.plan.offline import Planned, plan_offline

IDS = (torch.zeros(2, 8, dtype=torch.long),)


class Spare(nn.Module):
    """The results of a layer are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.spare(x).relu()
        return self.used(x)


def test_what_nobody_reads() -> None:
    """The first test: while the fixture lives, no other model can be planned."""
    with plan_offline(Spare(), 2, None, {"example_inputs": torch.ones(4, 8)}) as found:
        weight, bias = explain_planned(found, "spare")
        assert weight.placement == "sharded on dimension 0, for memory" and bias.placement == "replicated"
        assert weight.reason.startswith("No planned call reads what is computed with it")
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def planned() -> Iterator[Planned]:
    with plan_offline(Transformer(layers=6), 4, None, {"example_inputs": IDS}) as found:
        yield found
    torch._dynamo.reset()


def one(planned: Planned, name: str) -> Explanation:
    (found,) = explain_planned(planned, name)
    return found


def test_a_sharded_weight(planned: Planned) -> None:
    found = one(planned, "layers.0.mlp.down.weight")
    assert found.placement == "sharded on dimension 1 (row), 32×16 on rank 0"
    column, replicated = found.alternatives
    assert column.placement == "sharded on dimension 0 (column), 8×64 on rank 0"
    assert column.possible and column.seconds > 1e-5 and column.bytes == 0
    assert "1 more all-gather of 4.0 KiB after layers.0.mlp" in column.collectives
    assert "1 fewer all-reduce of 2.0 KiB after layers.0.mlp.down" in column.collectives
    assert replicated.placement == "replicated" and replicated.bytes == 32 * 64 * 4 * 3 // 4
    text = found.text()
    assert text.startswith(
        "layers.0.mlp.down.weight [32×64] on 4 ranks: sharded on dimension 1 (row), 32×16 on rank 0.\n"
        "  Every other placement costs more:\n"
    )
    assert "replicated: " in text and "+6.0 KiB per rank" in text and "µs per pass" in text


def test_a_repeated_block_is_explained_by_the_block_it_repeats(planned: Planned) -> None:
    assert planned.repeated and 5 in planned.repeated[0].like
    found = one(planned, "layers.5.mlp.down")
    assert found.name == "layers.5.mlp.down.weight"
    assert any("after layers.5.mlp" in text for text in found.alternatives[0].collectives)


def test_a_replicated_parameter_has_a_reason(planned: Planned) -> None:
    found = one(planned, "norm.weight")
    assert found.placement == "replicated"
    assert found.reason.startswith("Replicated because: a vector")
    assert found.alternatives[0].bytes == -32 * 4 * 3 // 4


def test_impossible_placements_are_named(planned: Planned) -> None:
    found = one(planned, "embed")
    impossible = [other for other in found.alternatives if not other.possible]
    assert [other.placement for other in impossible] == ["sharded on dimension 1, 96×8 on rank 0"]
    assert "not possible: no operator that uses it supports this placement." in found.text()


def test_a_module_explains_all_its_parameters(planned: Planned) -> None:
    names = [found.name for found in explain_planned(planned, "layers.0.attention")]
    assert names == [f"layers.0.attention.{x}.weight" for x in "qkvo"]


def test_a_node_of_the_program(planned: Planned) -> None:
    step = next(s for s in planned.solved.program.steps if "linear" in s.node.name)
    found = one(planned, step.node.name)
    assert found.name == "layers.0.attention.q: linear (aten.linear.default)"
    assert found.placement == "output sharded on dimension 2"
    assert found.reason.startswith("Its inputs arrive as: ") and "free to choose. It needs them as: " in found.reason
    assert {other.placement for other in found.alternatives} >= {"output replicated", "output partial"}
    assert all(other.cost >= 0 for other in found.alternatives)


def test_unknown_names_get_a_suggestion(planned: Planned) -> None:
    with pytest.raises(ValueError, match="no .* node 'layers.0.mlp.dwn'. Did you mean 'layers.0.mlp.down'"):
        explain_planned(planned, "layers.0.mlp.dwn")


def test_json_has_all_alternatives(planned: Planned) -> None:
    data = one(planned, "head").to_json()
    assert data["name"] == "head.weight" and data["shape"] == [96, 32] and data["world_size"] == 4
    assert data["alternatives"][0].keys() == {"placement", "possible", "seconds", "bytes", "cost", "collectives"}
