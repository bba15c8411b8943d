"""Explanations and comparisons of plans: their text is for people, in the model's own terms."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from solver.programs import Transformer
from torch import nn

from paraxis import compare_plans, plan_model
from paraxis.capture.repeated_blocks import Repeated
from paraxis.plan.explain import Explanation, explain_planned
from paraxis.plan.listing import _Listing
from paraxis.plan.make import Planned, plan_offline

IDS = (torch.zeros(2, 8, dtype=torch.long),)


def test_two_plans() -> None:
    first, plan = (
        plan_model(Transformer(layers=4), 4, example_inputs=IDS, constraints=wishes)
        for wishes in (None, {"*.down": "column", "head": "whole"})
    )
    text = compare_plans(first, plan).text()
    assert "layer layers.*.mlp.down (4 of them): row | column" in text
    assert "layer head: column | whole" in text
    assert "collective all_reduce after layers.*.mlp.down: 4 times | 0 times" in text
    assert "One pass, estimated: " in text and "Parameters on one rank: " in text
    assert not compare_plans(plan, plan)
    assert compare_plans(plan, plan).text().startswith("The plans place everything alike.")
    assert plan.seconds > first.seconds > first.communication > 0
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def planned() -> Iterator[Planned]:
    with plan_offline(Transformer(layers=6), 4, None, {"example_inputs": IDS}) as found:
        yield found
    torch._dynamo.reset()


def one(planned: Planned, name: str) -> Explanation:
    (found,) = explain_planned(planned, name)
    return found


def test_a_split_weight(planned: Planned) -> None:
    found = one(planned, "layers.0.mlp.down.weight")
    assert found.placement == "split on dimension 1 (row), 32×16 on the first rank"
    column, whole = found.alternatives
    assert column.placement == "split on dimension 0 (column), 8×64 on the first rank"
    assert column.possible and column.seconds > 1e-5 and column.bytes == 0
    assert "1 more all_gather of 4.0 KiB after layers.0.mlp" in column.collectives
    assert "1 less all_reduce of 2.0 KiB after layers.0.mlp.down" in column.collectives
    assert whole.placement == "whole on every rank" and whole.bytes == 32 * 64 * 4 * 3 // 4
    text = found.text()
    assert text.startswith(
        "layers.0.mlp.down.weight [32×64] over 4 ranks: split on dimension 1 (row), 32×16 on the first"
    )
    assert "whole on every rank: " in text and "+6.0 KiB on every rank" in text and "µs per pass" in text


def test_a_block_that_was_not_planned_is_explained_by_one_like_it(planned: Planned) -> None:
    assert planned.repeated and 5 in planned.repeated[0].like
    found = one(planned, "layers.5.mlp.down")
    assert found.name == "layers.5.mlp.down.weight"
    assert any("after layers.5.mlp" in text for text in found.alternatives[0].collectives)


def test_what_stays_whole_says_why(planned: Planned) -> None:
    found = one(planned, "norm.weight")
    assert found.placement == "whole on every rank"
    assert found.reason.startswith("It stays whole: a vector")
    assert found.alternatives[0].bytes == -32 * 4 * 3 // 4


def test_what_is_not_possible(planned: Planned) -> None:
    found = one(planned, "embed")
    impossible = [other for other in found.alternatives if not other.possible]
    assert [other.placement for other in impossible] == ["split on dimension 1, 96×8 on the first rank"]
    assert "not possible: no operator that uses it can run so." in found.text()


def test_a_module_is_all_its_parameters(planned: Planned) -> None:
    names = [found.name for found in explain_planned(planned, "layers.0.attention")]
    assert names == [f"layers.0.attention.{x}.weight" for x in "qkvo"]


def test_a_node_of_the_program(planned: Planned) -> None:
    step = next(s for s in planned.solved.program.steps if "linear" in s.node.name)
    found = one(planned, step.node.name)
    assert found.name == "layers.0.attention.q: linear (aten.linear.default)"
    assert found.placement == "its result split on dimension 2"
    assert {other.placement for other in found.alternatives} >= {"its result whole", "its result as sums in parts"}
    assert all(other.cost >= 0 for other in found.alternatives)


def test_names_that_nothing_has(planned: Planned) -> None:
    with pytest.raises(ValueError, match="'layers.0.mlp.dwn' is neither .* Did you mean 'layers.0.mlp.down'"):
        explain_planned(planned, "layers.0.mlp.dwn")


def test_plain_data(planned: Planned) -> None:
    data = one(planned, "head").to_json()
    assert data["name"] == "head.weight" and data["shape"] == [96, 32] and data["world_size"] == 4
    assert data["alternatives"][0].keys() == {"placement", "possible", "seconds", "bytes", "cost", "collectives"}


def test_blocks_left_out_of_a_program_are_named_together() -> None:
    listing = object.__new__(_Listing)
    alike = Repeated("model.layers", nn.ModuleList(), 2, {2: 1, 3: 1, 4: 0, 6: 1})
    listing.planned = SimpleNamespace(repeated=[alike])  # type: ignore[assignment]
    assert listing._others() == [
        "# model.layers.2 to model.layers.3 run as model.layers.1 does.",
        "# model.layers.4 runs as model.layers.0 does.",
        "# model.layers.6 runs as model.layers.1 does.",
    ]
