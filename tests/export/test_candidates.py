"""What of a plan could be split, and how it is written for whom; without running anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from zoo.cases import find

from paraxis.export.candidates import Candidates, Group, find_candidates, generic
from paraxis.export.choose import Choice
from paraxis.export.loading import cut_before_converted
from paraxis.export.targets import (
    NotExportable,
    matches,
    restricted,
    styles_of_transformers,
    torch_source,
    transformers_plans,
    vllm_plan,
)
from paraxis.placement import Layout, Replicate, Shard
from paraxis.plan import LayerPlan, Plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


class Model(nn.Module):
    """An embedding whose weight the head has too, and a head whose bias is someone else's."""

    def __init__(self, own_bias: bool = False, rows: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Module()
        self.head.decoder = nn.Linear(8, rows, bias=own_bias)
        self.head.decoder.weight = self.embed.weight
        if own_bias:
            self.head.bias = self.head.decoder.bias


def planned(model: nn.Module, axes: dict[str, tuple[str | None, bool, bool]]) -> Plan:
    """A plan for two ranks, by names with the numbers left open: axis, gathers, gets a split input."""
    plan = Plan(2)
    for name, module in model.named_modules():
        if generic(name) not in axes or not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        axis, gathers, split = axes[generic(name)]
        kind = "linear" if isinstance(module, nn.Linear) else "embedding"
        plan.layers.append(LayerPlan(name, kind, axis, gathers, split, False))
        dim = 1 if axis == "row" else 0
        size = module.weight.shape[dim]
        placement = Shard.of(dim, Layout.even(size, 2)) if axis else Replicate()
        plan.add_parameter(f"{name}.weight", placement, module.weight.shape, 0)
    return plan


AXES: dict[str, tuple[str | None, bool, bool]] = {
    "embed": ("vocab", True, False),
    "blocks.*.up": ("column", False, False),
    "blocks.*.down": ("row", True, True),
    "head.decoder": ("column", True, False),
}


def ways(found: Candidates) -> list[dict[str, str]]:
    return [group.ways for group in found.groups]


def test_groups_and_shared_weights() -> None:
    model = Model()
    found = find_candidates(model, planned(model, AXES))
    assert {"embed": "vocab", "head.decoder": "column-gathered"} in ways(found)
    assert {"blocks.*.up": "column", "blocks.*.down": "row"} in ways(found)
    assert not found.whole


def test_a_shared_bias_keeps_all_that_share_whole() -> None:
    model = Model(own_bias=True)
    found = find_candidates(model, planned(model, AXES))
    assert set(found.whole) == {"embed", "head", "head.decoder"} and all(found.whole.values())
    assert ways(found) == [{"blocks.*.up": "column", "blocks.*.down": "row"}]


def test_sizes_that_do_not_divide() -> None:
    model = Model(rows=13)
    found = find_candidates(model, planned(model, AXES))
    assert "13" in found.whole["embed"] and "head.decoder" in found.whole


def test_the_usual_way_where_the_plan_gathers() -> None:
    """What it is apart is kept for the case that the usual way is not right."""
    model = Model()
    gathers = {**AXES, "blocks.*.up": ("column", True, False), "blocks.*.down": ("column", True, False)}
    found = find_candidates(model, planned(model, gathers))
    (group,) = [g for g in found.groups if g.where == "blocks.*"]
    assert group.ways == {"blocks.*.up": "column", "blocks.*.down": "row"}
    assert set(group.instead.values()) == {"column-gathered"}


def test_what_the_plan_leaves_whole_stays_whole() -> None:
    model = Model()
    plan = planned(model, {**AXES, "blocks.*.up": (None, False, False)})
    plan.replicated.append(("blocks.0.up.weight", "too small"))
    found = find_candidates(model, plan)
    assert "too small" in found.whole["blocks.*.up"]
    assert {"blocks.*.down": "row-split"} in ways(found)


def test_only_styles_that_there_are() -> None:
    packed = {"a.up": "column-packed", "a.down": "row"}
    apart = {"a.up": "column-gathered", "a.down": "row-split"}
    experts = {"e": "experts", "e.up": "cut:-2:2", "e.down": "cut:-1:1"}
    found = Candidates([Group("a", packed, instead=apart), Group("e", experts)])
    assert ways(restricted(found, "transformers")) == [packed, experts]
    torch_ = restricted(found, "torch")
    assert ways(torch_) == [{"a.up": "column-gathered"}, {"a.down": "row-split"}]
    assert set(torch_.whole) == {"e"} and "three dimensions" in torch_.whole["e"]
    assert ways(restricted(found, "vllm")) == []
    biased = Candidates([Group("e", {"e": "experts", "e.bias": "cut:-1:1"})])
    assert not restricted(biased, "transformers").groups  # a row style leaves a `bias` whole


@pytest.fixture(scope="module")
def llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32))


MLP = {
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
}


def test_what_a_shipped_plan_splits_is_named(llama: Any) -> None:
    """transformers merges a plan with its own: what is to stay whole has to be said."""
    plans = transformers_plans(llama, Choice(dict(MLP), {}))
    names = styles_of_transformers()
    assert plans["tp_plan"]["model.layers.*.mlp.down_proj"] == names["row"] == "rowwise"
    assert plans["base_model_tp_plan"]["layers.*.mlp.gate_proj"] == "colwise"
    from transformers.distributed import tensor_parallel

    if hasattr(tensor_parallel, "resolve_parallel_plans"):
        others = {"model.layers.*.self_attn.q_proj", "model.embed_tokens", "lm_head"}
        assert {plans["tp_plan"][name] for name in others} == {"replicate"}
        assert plans["base_model_tp_plan"]["embed_tokens"] == "replicate"


def test_vllm_needs_split_attention(llama: Any) -> None:
    with pytest.raises(NotExportable, match=r"model.layers.\*.self_attn"):
        vllm_plan(llama, Choice(dict(MLP), {}), generic, 2)
    attention = {f"model.layers.*.self_attn.{x}_proj": "column" for x in "qkv"}
    attention["model.layers.*.self_attn.o_proj"] = "row"
    plan = vllm_plan(llama, Choice({**MLP, **attention}, {}), generic, 2)
    assert plan["layers.*.self_attn.o_proj"] == "rowwise" and set(plan.values()) == {"colwise", "rowwise"}
    with pytest.raises(NotExportable, match="from the left"):
        vllm_plan(llama, Choice({**attention, "model.layers.*.mlp.gate": "column"}, {}), generic, 2)
    with pytest.raises(NotExportable, match=r"keys and values of model.layers.\*.self_attn are \d+, .* over 16 ranks"):
        vllm_plan(llama, Choice({**MLP, **attention}, {}), generic, 16)


def test_torch_source_runs() -> None:
    source = torch_source({"a.*.b": "ColwiseParallel(output_layouts=Replicate())"}, [("head", "embed")], "A model.")
    exported: dict[str, Any] = {}
    exec(compile(source, "plan.py", "exec"), exported)
    assert set(exported["PLAN"]) == {"a.*.b"} and callable(exported["parallelize"])
    assert matches("a.*.b", "a.10.b") and not matches("a.*.b", "a.1.c.b")


def test_cut_before_converted() -> None:
    """Parameters that checkpoints hold in one tensor stay whole for transformers, which would cut that tensor."""
    assert not cut_before_converted(find("llama").make())
    pytest.importorskip("transformers.models.hrm_text")
    model = find("hrm_text").make()
    found = cut_before_converted(model)
    assert "attn.gqkv_proj.weight" in found["model.L_module.layers.*.self_attn.k_proj"]
    assert "model.L_module.layers.*.self_attn.o_proj" not in found and "lm_head" not in found
    groups = [
        Group(
            "mlp",
            {f"model.H_module.layers.*.mlp.{name}_proj": way for name, way in (("up", "column"), ("down", "row"))},
            instead={"model.H_module.layers.*.mlp.down_proj": "row-split"},
        )
    ]
    candidates = Candidates(groups)
    candidates.drop(found)
    assert list(candidates.whole) == ["model.H_module.layers.*.mlp.up_proj"]
    assert [group.ways for group in candidates.groups] == [{"model.H_module.layers.*.mlp.down_proj": "row-split"}]
