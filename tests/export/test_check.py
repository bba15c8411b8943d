"""Exact plans pass, inexact plans are found, for whatever reason they are inexact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from export.models import ATTENTION, ENDS, MLP, SIZES, check, llama
from torch import nn
from transformers import Olmo2Config, Phi3Config

from paraxis.export.check import is_divisible, tensors_by_name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_exact_plans_pass(world: int, fields: dict[str, Any]) -> None:
    checked = check(llama(num_key_value_heads=4, **fields), world)
    assert set(checked.expected) >= {"logits", "cached.logits", "cached.next.logits"}
    outcome = checked({**ATTENTION, **MLP, **ENDS})
    assert outcome.exact, outcome


INEXACT: dict[str, tuple[Any, dict[str, str]]] = {
    "fewer heads than ranks": (llama(num_key_value_heads=1), ATTENTION),
    "a row with a replicated input": (llama(), {"model.layers.*.mlp.down_proj": "row"}),
    "a column without a row": (llama(), {"model.layers.*.mlp.gate_proj": "column"}),
    "one side of a gate": (llama(), {k: v for k, v in MLP.items() if "up" not in k}),
    "sharded logits": (llama(), {"lm_head": "column"}),
    "packed halves sharded as one": (
        Phi3Config(**SIZES, num_key_value_heads=4, pad_token_id=0),
        {"model.layers.*.mlp.gate_up_proj": "column", "model.layers.*.mlp.down_proj": "row"},
    ),
    "packed heads": (
        Phi3Config(**SIZES, num_key_value_heads=4, pad_token_id=0),
        {"model.layers.*.self_attn.qkv_proj": "column", "model.layers.*.self_attn.o_proj": "row"},
    ),
    "a norm over all heads": (Olmo2Config(**SIZES, num_key_value_heads=4), ATTENTION),
}


@pytest.mark.parametrize("case", INEXACT)
def test_inexact_plans_are_found(case: str) -> None:
    config, plan = INEXACT[case]
    outcome = check(config)(plan)
    assert not outcome.exact
    assert outcome.reason


def test_packed_halves() -> None:
    config = Phi3Config(**SIZES, num_key_value_heads=4, pad_token_id=0)
    plan = {"model.layers.*.mlp.gate_up_proj": "column-packed", "model.layers.*.mlp.down_proj": "row"}
    assert check(config)(plan).exact


def test_no_styles_are_exact() -> None:
    assert check(llama())({}).exact


def test_divisible_sizes() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(6, 8)])})
    assert is_divisible(model, {"blocks.*": "column"}, 4) and is_divisible(model, {"blocks.*": "row"}, 3)
    assert not is_divisible(model, {"blocks.*": "row"}, 4) and not is_divisible(model, {"blocks.*": "column-packed"}, 8)
    assert not is_divisible(model, {"other": "column"}, 2)


def test_tensors_by_name() -> None:
    x = torch.ones(2)
    found = tensors_by_name({"logits": x, "states": (x, [x]), "past_key_values": x, "ids": torch.ones(2).long()})
    assert list(found) == ["logits", "states.0", "states.1.0"]
