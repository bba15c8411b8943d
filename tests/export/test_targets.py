"""How a plan is written for each library, and which styles each supports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paraxis.export.candidates import Candidates, Group, generic
from paraxis.export.choose import Choice
from paraxis.export.targets import (
    NotExportable,
    matches,
    restricted,
    ships_plan,
    styles_of_transformers,
    torch_plan,
    torch_source,
    transformers_plans,
    vllm_plan,
)


def styles(found: Candidates) -> list[dict[str, str]]:
    return [group.styles for group in found.groups]


def test_only_supported_styles() -> None:
    packed = {"a.up": "column-packed", "a.down": "row"}
    separate = {"a.up": "column-gathered", "a.down": "row-split"}
    experts = {"e": "experts", "e.up": "shard:-2:2", "e.down": "shard:-1:1"}
    found = Candidates([Group("a", packed, separate=separate), Group("e", experts)])
    assert styles(restricted(found, "transformers")) == [packed, experts]
    for_torch = restricted(found, "torch")
    assert styles(for_torch) == [{"a.up": "column-gathered"}, {"a.down": "row-split"}]
    assert for_torch.replicated == {"e": "torch has no style for 3-D weights"}
    for_vllm = restricted(found, "vllm")
    assert styles(for_vllm) == [] and for_vllm.replicated["e"] == "vLLM runs fused experts itself"
    biased = Candidates([Group("e", {"e": "experts", "e.bias": "shard:-1:1"})])
    assert not restricted(biased, "transformers").groups  # a row style never shards a `bias`


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


def test_modules_of_the_shipped_plan_are_named_as_replicated(llama: Any) -> None:
    """transformers merges a plan with its own: what is to be replicated must be named."""
    plans = transformers_plans(llama, Choice(dict(MLP), {}))
    names = styles_of_transformers()
    assert ships_plan(llama)
    assert plans["tp_plan"]["model.layers.*.mlp.down_proj"] == names["row"] == "rowwise"
    assert plans["base_model_tp_plan"]["layers.*.mlp.gate_proj"] == "colwise"
    from transformers.distributed import tensor_parallel

    if hasattr(tensor_parallel, "resolve_parallel_plans"):
        others = {"model.layers.*.self_attn.q_proj", "model.embed_tokens", "lm_head"}
        assert {plans["tp_plan"][name] for name in others} == {"replicate"}
        assert plans["base_model_tp_plan"]["embed_tokens"] == "replicate"


def test_vllm_needs_sharded_attention(llama: Any) -> None:
    with pytest.raises(NotExportable, match=r"model.layers.\*.self_attn cannot be sharded"):
        vllm_plan(llama, Choice(dict(MLP), {}), generic, 2)
    attention = {f"model.layers.*.self_attn.{x}_proj": "column" for x in "qkv"}
    attention["model.layers.*.self_attn.o_proj"] = "row"
    plan = vllm_plan(llama, Choice({**MLP, **attention}, {}), generic, 2)
    assert plan["layers.*.self_attn.o_proj"] == "rowwise" and set(plan.values()) == {"colwise", "rowwise"}
    with pytest.raises(NotExportable, match="from the left"):
        vllm_plan(llama, Choice({**attention, "model.layers.*.mlp.gate": "column"}, {}), generic, 2)
    with pytest.raises(NotExportable, match=r"2 KV heads of model.layers.\*.self_attn are not divisible by 16 ranks"):
        vllm_plan(llama, Choice({**MLP, **attention}, {}), generic, 16)


def test_torch_source_runs() -> None:
    plan = torch_plan(Choice({"a.*.b": "column-gathered"}, {}))
    assert plan == {"a.*.b": "ColwiseParallel(output_layouts=Replicate())"}
    source = torch_source(plan, [("head", "embed")], "A model.")
    exported: dict[str, Any] = {}
    exec(compile(source, "plan.py", "exec"), exported)
    assert set(exported["PLAN"]) == {"a.*.b"} and callable(exported["parallelize"])
    assert matches("a.*.b", "a.10.b") and not matches("a.*.b", "a.1.c.b")
