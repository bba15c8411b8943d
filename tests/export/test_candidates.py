"""Which modules of a plan could be sharded, alone or in groups; without running anything."""

from __future__ import annotations

from torch import nn

from paraxis.export.candidates import Candidates, Group, find_candidates, generic
from paraxis.placement import Layout, Replicate, Shard
from paraxis.plan import LayerPlan, ParameterPlan, Plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


class Model(nn.Module):
    """A head that is tied to the embedding, and whose bias may be a parameter of its parent."""

    def __init__(self, own_bias: bool = False, rows: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Module()
        self.head.decoder = nn.Linear(8, rows, bias=own_bias)
        self.head.decoder.weight = self.embed.weight
        if own_bias:
            self.head.bias = self.head.decoder.bias


Axes = dict[str, tuple[str | None, bool, bool]]
"""By generic names: the axis, whether the output is gathered, whether the input is sharded."""

AXES: Axes = {
    "embed": ("vocab", True, False),
    "blocks.*.up": ("column", False, False),
    "blocks.*.down": ("row", True, True),
    "head.decoder": ("column", True, False),
}


def planned(model: nn.Module, axes: Axes, replicated: list[tuple[str, str]] | None = None) -> Plan:
    """A plan for two ranks."""
    layers, parameters = [], {}
    for name, module in model.named_modules():
        if generic(name) not in axes or not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        axis, gathers, sharded_input = axes[generic(name)]
        kind = "linear" if isinstance(module, nn.Linear) else "embedding"
        layers.append(LayerPlan(name, kind, axis, gathers, sharded_input, False))
        dim = 1 if axis == "row" else 0
        shape = tuple(module.weight.shape)
        placement = Shard.of(dim, Layout.even(shape[dim], 2)) if axis else Replicate()
        parameters[f"{name}.weight"] = ParameterPlan(placement, shape, shape)
    return Plan(2, layers=layers, parameters=parameters, replicated=replicated or [])


def styles(found: Candidates) -> list[dict[str, str]]:
    return [group.styles for group in found.groups]


def test_generic_names() -> None:
    assert generic("model.layers.10.mlp.experts.3") == "model.layers.*.mlp.experts.*"
    assert generic("h2.weight") == "h2.weight"


def test_groups_and_tied_weights() -> None:
    model = Model()
    found = find_candidates(model, planned(model, AXES))
    assert {"embed": "vocab", "head.decoder": "column-gathered"} in styles(found)
    assert {"blocks.*.up": "column", "blocks.*.down": "row"} in styles(found)
    assert not found.replicated


def test_a_tied_bias_replicates_all_that_share_it() -> None:
    model = Model(own_bias=True)
    found = find_candidates(model, planned(model, AXES))
    assert set(found.replicated) == {"embed", "head", "head.decoder"} and all(found.replicated.values())
    assert styles(found) == [{"blocks.*.up": "column", "blocks.*.down": "row"}]


def test_sizes_that_are_not_divisible() -> None:
    model = Model(rows=13)
    found = find_candidates(model, planned(model, AXES))
    assert "13" in found.replicated["embed"] and "head.decoder" in found.replicated


def test_the_standard_group_where_the_plan_gathers() -> None:
    """The separate styles remain for the case that the group is not exact."""
    model = Model()
    gathers = {**AXES, "blocks.*.up": ("column", True, False), "blocks.*.down": ("column", True, False)}
    found = find_candidates(model, planned(model, gathers))
    (group,) = [g for g in found.groups if g.where == "blocks.*"]
    assert group.styles == {"blocks.*.up": "column", "blocks.*.down": "row"}
    assert set(group.separate.values()) == {"column-gathered"}


def test_what_the_plan_replicates_is_replicated() -> None:
    model = Model()
    axes = {**AXES, "blocks.*.up": (None, False, False)}
    found = find_candidates(model, planned(model, axes, [("blocks.0.up.weight", "too small")]))
    assert found.replicated["blocks.*.up"] == "replicated in the plan: too small"
    assert {"blocks.*.down": "row-split"} in styles(found)


def test_subclasses_with_their_own_forward_are_noted() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input):  # type: ignore[no-untyped-def]
            return 2 * super().forward(input)

    model = nn.Sequential(Scaled(12, 8))
    assert find_candidates(model, planned(model, {"0": ("vocab", True, False)})).custom_forward == {"0"}


def test_experts_are_sharded_on_their_width() -> None:
    """As the plan does it, then in the other orders of inputs and outputs; packed before unpacked."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (
                nn.Parameter(nn.Linear(8, 8).weight.expand(4, 8, 8)),
                nn.Parameter(nn.Linear(8, 8).weight.expand(4, 8, 8)),
            )

    model = nn.ModuleDict({"experts": Experts()})
    shards = {"up": Shard.of(1, Layout.even(8, 2)), "down": Shard.of(2, Layout.even(8, 2))}
    parameters = {f"experts.{name}": ParameterPlan(p, (4, 8, 8), (4, 4, 8)) for name, p in shards.items()}
    (group,) = find_candidates(model, Plan(2, parameters=parameters)).groups
    assert group.styles == {"experts": "experts", "experts.up": "shard:-2:1", "experts.down": "shard:-1:1"}
    assert [option["experts.up"] for option in group.alternatives] == [
        "shard:-2:2",
        "shard:-2:1",
        "shard:-1:2",
        "shard:-1:1",
    ]
    found = find_candidates(model, Plan(2, replicated=[("experts.up", "no rule")]))
    assert found.replicated == {"experts": "replicated in the plan: no rule"}


def test_dropped_modules_leave_the_others_separate() -> None:
    group = Group("mlp", {"mlp.up": "column", "mlp.down": "row"}, separate={"mlp.down": "row-split"})
    found = Candidates([group])
    found.drop({"mlp.up": "stored packed"})
    assert found.replicated == {"mlp.up": "stored packed"}
    assert styles(found) == [{"mlp.down": "row-split"}] and found.groups[0].reason == "mlp.up: stored packed"
