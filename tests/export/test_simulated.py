"""Plans on simulated ranks: what is right passes, what is not is found, whatever it is that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig, Olmo2Config, Phi3Config

from paraxis.export.candidates import Candidates, Group
from paraxis.export.choose import Check, choose, choose_alone
from paraxis.export.simulate import SplitWeightUsed, run_split
from paraxis.export.small import NotSmall, narrowed, small_like

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ATTENTION = {f"model.layers.*.self_attn.{x}_proj": "column" for x in "qkv"} | {"model.layers.*.self_attn.o_proj": "row"}
MLP = {f"model.layers.*.mlp.{x}_proj": "column" for x in ("gate", "up")} | {"model.layers.*.mlp.down_proj": "row"}
ENDS = {"model.embed_tokens": "vocab", "lm_head": "column-gathered"}


def check(config: Any, world: int = 2) -> Check:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            else:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return Check(model, world)


def llama(**sizes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, **sizes})


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_right_plans_are_right(world: int, fields: dict[str, Any]) -> None:
    several = check(llama(num_key_value_heads=4, **fields), world)
    assert set(several.expected) >= {"logits", "cached.logits", "cached.next.logits"}
    seen = several({**ATTENTION, **MLP, **ENDS})
    assert seen.right, seen


WRONG: dict[str, tuple[Any, dict[str, str]]] = {
    "fewer heads than ranks": (llama(num_key_value_heads=1), ATTENTION),
    "a row that gets a whole input": (llama(), {"model.layers.*.mlp.down_proj": "row"}),
    "a column that nobody sums": (llama(), {"model.layers.*.mlp.gate_proj": "column"}),
    "one side of a gate": (llama(), {k: v for k, v in MLP.items() if "up" not in k}),
    "logits in parts": (llama(), {"lm_head": "column"}),
    "halves cut as one": (
        Phi3Config(**SIZES, num_key_value_heads=4, pad_token_id=0),
        {"model.layers.*.mlp.gate_up_proj": "column", "model.layers.*.mlp.down_proj": "row"},
    ),
    "packed heads": (
        Phi3Config(**SIZES, num_key_value_heads=4, pad_token_id=0),
        {"model.layers.*.self_attn.qkv_proj": "column", "model.layers.*.self_attn.o_proj": "row"},
    ),
    "a norm over all heads": (Olmo2Config(**SIZES, num_key_value_heads=4), ATTENTION),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_plans_are_found(case: str) -> None:
    config, plan = WRONG[case]
    seen = check(config)(plan)
    assert not seen.right
    assert seen.reason


def test_packed_halves() -> None:
    config = Phi3Config(**SIZES, num_key_value_heads=4, pad_token_id=0)
    plan = {"model.layers.*.mlp.gate_up_proj": "column-packed", "model.layers.*.mlp.down_proj": "row"}
    assert check(config)(plan).right


def test_a_bias_is_added_once() -> None:
    """Else it would be there once per rank; small enough, that would pass for rounding."""
    several = check(llama(mlp_bias=True))
    (linear,) = [m for n, m in several.model.named_modules() if n == "model.layers.0.mlp.down_proj"]
    (found, _) = run_split(linear, {"": "row-split"}, 2, lambda name: name, lambda m: m(torch.ones(1, 64)))
    assert torch.allclose(found, linear(torch.ones(1, 64)), atol=1e-6)


def test_weights_used_elsewhere() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.layer.weight.shape == (8, 8) and self.layer.weight.dtype == torch.float32
            return self.layer(x) @ self.layer.weight

    with pytest.raises(SplitWeightUsed):
        run_split(Twice(), {"layer": "column-gathered"}, 2, lambda name: name, lambda m: m(torch.ones(1, 8)))


def test_ranks_that_fail_let_the_others_go() -> None:
    arrived: list[int] = []

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            arrived.append(1)
            if len(arrived) == 2:
                raise KeyError("one of them")
            return self.layer(x)

    with pytest.raises(KeyError, match="one of them"):
        run_split(Uneven(), {"layer": "column-gathered"}, 4, lambda name: name, lambda m: m(torch.ones(1, 8)))


def test_groups_that_fail_are_split_apart() -> None:
    """One KV head over two ranks: the attention is gathered layer by layer, the rest stays as it is."""
    apart = {p: "row-split" if way == "row" else "column-gathered" for p, way in ATTENTION.items()}
    groups = [
        Group("attention", ATTENTION, instead=apart),
        Group("mlp", MLP),
        *(Group(p, {p: w}) for p, w in ENDS.items()),
    ]
    choice = choose(Candidates(groups), check(llama(num_key_value_heads=1)))
    assert choice.ways == {**apart, **MLP, **ENDS}
    assert set(choice.gathered) == set(ATTENTION) and choice.error is not None and choice.error < 1e-4
    alone = choose_alone(Candidates(groups), "not tried")
    assert alone.ways == {**apart, **ENDS} and set(alone.whole) == set(MLP)


def test_small_models_keep_their_heads() -> None:
    from transformers import LlamaForCausalLM

    large = llama(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=6, num_attention_heads=64, vocab_size=128258
    )
    seen: list[Check] = []

    def obstacle(model: nn.Module) -> str:
        seen[:] = [Check(model, 4)]
        return ""

    with small_like(large, LlamaForCausalLM, 4, obstacle) as model:
        config: Any = model.config
        assert (config.num_attention_heads, config.num_key_value_heads) == (64, 2)
        assert config.vocab_size % 4 == 128258 % 4 and sum(p.numel() for p in model.parameters()) < 40e6
        assert not seen[0](ATTENTION).right and seen[0](MLP).right
    refused = small_like(llama(), LlamaForCausalLM, 4, lambda model: "not this one")
    with pytest.raises(NotSmall, match="not this one"), refused:
        pass


def test_narrowed_configurations() -> None:
    data = GPT2Config(n_embd=768, n_head=12, n_layer=12, vocab_size=50257).to_dict()
    small = narrowed(data, 8, 2)
    assert (small["n_embd"], small["n_head"], small["n_layer"]) == (96, 12, 12)
    assert small["vocab_size"] % 2 == 1 and small["eos_token_id"] < small["vocab_size"] < 5000
