"""The plan: JSON both ways, also of the previous version, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from paraxis import plan_model
from paraxis.placement import REPLICATE, Layout, Placement, Shard, local_shape
from paraxis.plan import CollectivePlan, LayerPlan, Memory, ParameterPlan, Plan


def small_plan(rank: int = 0, layers: int = 3) -> Plan:
    """A plan for two ranks, with the shapes of one of them. The embedding is uneven, so that they differ."""
    parameters: dict[str, ParameterPlan] = {}

    def add(name: str, placement: Placement, shape: tuple[int, ...]) -> tuple[int, ...]:
        parameters[name] = ParameterPlan(placement, shape, local_shape(placement, shape, rank))
        return parameters[name].local_shape

    local = add("embed.weight", Shard.of(0, Layout.even(13, 2)), (13, 4))
    found = [LayerPlan("embed", "embedding", "vocab", True, False, False, (13, 4), local)]
    add("norm.weight", REPLICATE, (4,))
    for k in range(layers):
        local = add(f"layers.{k}.up.weight", Shard.of(0, Layout.even(8, 2)), (8, 4))
        found.append(LayerPlan(f"layers.{k}.up", "linear", "column", False, False, False, (8, 4), local))
        local = add(f"layers.{k}.gate.weight", REPLICATE, (6, 4))
        found.append(LayerPlan(f"layers.{k}.gate", "linear", None, False, False, False, (6, 4), local))
    reduces = [CollectivePlan("all_reduce", f"layers.{k}.down", (1, None, 4), "float32") for k in range(layers)]
    gates = [(f"layers.{k}.gate.weight", "no rule for aten.foo") for k in range(layers)]
    return Plan(
        2,
        layers=found,
        parameters=parameters,
        collectives=[*reduces, CollectivePlan("all_gather", "head", (1, None, 13), "float32")],
        replicated=[*gates, ("norm.weight", "a vector")],
        gathered=[(f"layers.{k}.gate", "aten.foo on a sharded tensor") for k in range(layers)],
        cost=0.25,
        optimal=True,
    )


def render(plan: Plan) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan.table())
    return console.export_text()


def test_json_round_trip() -> None:
    plan = small_plan()
    data = json.loads(json.dumps(plan.to_json()))
    again = Plan.from_json(data)
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.parameters["embed.weight"].placement == Shard.of(0, Layout.even(13, 2))
    assert again.collectives[0].shape == (1, None, 4)
    assert again.replicated[-1] == ("norm.weight", "a vector")


def test_json_of_the_previous_version_loads() -> None:
    data = small_plan().to_json()
    data["memory"] = {"parameters": 8, "buffers": 0, "unknown": "no cache", "uncounted": "no ids", "total": 8}
    memory = Plan.from_json(json.loads(json.dumps(data))).memory
    assert memory == Memory(8, 0, cache_error="no cache", activations_error="no ids")
    for former, value in (("unknown", "no cache"), ("uncounted", "no ids")):
        with pytest.warns(DeprecationWarning, match=f"Memory.{former} is deprecated"):
            assert getattr(memory, former) == value


def test_json_is_the_same_on_every_rank() -> None:
    assert small_plan(0) != small_plan(1)
    assert small_plan(0).to_json() == small_plan(1).to_json()
    assert small_plan(1).parameters["embed.weight"].local_shape == (6, 4)
    assert small_plan(1).to_json()["parameters"]["embed.weight"]["local_shape"] == [7, 4]
    assert small_plan(1).to_json()["layers"][0]["local_shape"] == [7, 4]


def test_save_and_load(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    small_plan().save(path)
    assert Plan.load(path) == small_plan()


def test_sharded_fraction_is_that_of_the_largest_shard() -> None:
    plan = small_plan(rank=1, layers=1)
    total = 13 * 4 + 4 + 8 * 4 + 6 * 4
    assert plan.sharded_fraction == pytest.approx((7 * 4 + 4 + 4 * 4 + 6 * 4) / total)
    assert Plan(2).sharded_fraction == 1.0
    even = Plan(4, parameters={"w": ParameterPlan(Shard.of(1, Layout.even(8, 4)), (3, 8), (3, 2))})
    assert even.sharded_fraction == 0.25


def test_collectives_are_counted_by_kind() -> None:
    assert small_plan().count() == {"all_reduce": 3, "all_gather": 1}
    assert Plan(2).count() == {}


def test_table_shows_repeated_blocks_once() -> None:
    text = render(small_plan())
    assert text.count("layers.*.up") == 1 and "layers.0" not in text
    row = next(line for line in text.splitlines() if "layers.*.up" in line)
    assert "3" in row and "column" in row and "8×4" in row and "4×4" in row
    gate = next(line for line in text.splitlines() if "layers.*.gate " in line and "linear" in line)
    assert gate.count("replicated") == 2
    embed = next(line for line in text.splitlines() if "embed " in line)
    assert "vocab" in embed and "all-reduce" in embed
    assert "Plan for 2 ranks" in text and f"{small_plan().sharded_fraction:.1%}" in text


@pytest.mark.parametrize(
    ("axis", "gather_output", "sequence_parallel", "collective"),
    [
        ("row", True, False, "all-reduce"),
        ("row", True, True, "reduce-scatter"),
        ("vocab", True, False, "all-reduce"),
        ("column", True, False, "all-gather"),
        ("column", False, True, ""),
        (None, False, False, ""),
    ],
)
def test_the_collective_of_a_layer(
    axis: str | None, gather_output: bool, sequence_parallel: bool, collective: str
) -> None:
    assert LayerPlan("layer", "linear", axis, gather_output, False, sequence_parallel).collective == collective


def test_caption_says_what_is_replicated_and_why() -> None:
    text = render(small_plan())
    assert "Collectives per forward pass: 3 all-reduce, 1 all-gather." in text
    assert text.count("Replicated: layers.*.gate.weight: no rule for aten.foo") == 1
    assert text.count("Gathered: layers.*.gate: aten.foo on a sharded tensor") == 1
    assert "norm.weight" not in text  # vectors are always replicated
    assert "none" in render(Plan(2))


def test_two_layers_of_one_call() -> None:
    """torch's attention is one call for the compiler, with two matrices in it."""
    block = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    plan = plan_model(block, 2, example_inputs=torch.ones(2, 4, 16))
    axes = {layer.name: layer.axis for layer in plan.layers}
    assert axes == {"self_attn": "column", "self_attn.out_proj": "row", "linear1": "column", "linear2": "row"}


def test_the_table_has_parameters_that_are_no_layer() -> None:
    """Convolutions, experts and plain parameters; vectors are left out."""
    convolution, plain = (64, 3, 4, 4), (1, 5, 64)
    parameters = {
        "embeddings.projection.weight": ParameterPlan(Shard.of(0, Layout.even(64, 2)), convolution, (32, 3, 4, 4)),
        "embeddings.position_embeddings": ParameterPlan(REPLICATE, plain, plain),
        "norm.weight": ParameterPlan(REPLICATE, (64,), (64,)),
        "head.weight": ParameterPlan(Shard.of(0, Layout.even(10, 2)), (10, 64), (5, 64)),
    }
    head = LayerPlan("head", "linear", "column", True, False, False, (10, 64), (5, 64))
    rows = _rows(Plan(2, [head], parameters))
    assert [row[0] for row in rows] == ["head", "embeddings.projection.weight", "embeddings.position_embeddings"]
    assert rows[1][2:4] == ["parameter", "sharded (0)"] and rows[1][6:] == ["64×3×4×4", "32×3×4×4"]
    assert rows[2][2:4] == ["parameter", "replicated"]


def test_the_table_of_a_vision_transformer() -> None:
    """The convolution of the patches, and parameters without a module of their own."""
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=8
    )
    model = ViTForImageClassification(config)
    rows = {
        row[0]: row for row in _rows(plan_model(model, 2, example_inputs={"pixel_values": torch.zeros(2, 3, 16, 16)}))
    }
    patches = next(row for name, row in rows.items() if name.endswith("projection.weight"))
    assert patches[2] == "parameter" and patches[6] == "32×3×8×8"
    assert rows["vit.embeddings.cls_token"][6] == "1×1×32"
    assert rows["vit.embeddings.position_embeddings"][6] == "1×5×32"


def test_rows_of_one_pattern_say_which_layers_they_are() -> None:
    layers = [
        LayerPlan(f"layers.{i}.mlp.up", "linear", "column", False, False, False, shape, (shape[0] // 2, 8))
        for i, shape in enumerate([(16, 8), (32, 8), (32, 8), (16, 8)])
    ]
    assert [row[0] for row in _rows(Plan(2, layers))] == ["layers.[0,3].mlp.up", "layers.[1-2].mlp.up"]


def _rows(plan: Plan) -> list[list[str]]:
    return [list(row) for row in zip(*(column.cells for column in plan.table().columns), strict=True)]
