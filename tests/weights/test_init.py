"""Weights without a checkpoint: the same full tensors on any number of ranks."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from weights.tiny_models import fake_rank, planned, tiny_model

from paraxis.distributed.redistribute import slice_box
from paraxis.placement import REPLICATE
from paraxis.weights.init import (
    common_seed,
    initialize_parameters,
    model_init_fn,
    new_head_parameters,
    optional_parameters,
)

CPU = torch.device("cpu")
NORMAL = partial(nn.init.normal_, std=0.02)


def initialized(rank: int, world: int, seed: int = 7) -> dict[str, nn.Parameter]:
    with fake_rank(rank, world) as group:
        _, params = planned("GPT2LMHeadModel", world, group)
        initialize_parameters(params, NORMAL, seed, rank, CPU)
    return params


def locals_of(params: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: param.local for name, param in params.items()}  # type: ignore[attr-defined]


def test_the_same_weights_on_any_number_of_ranks() -> None:
    full = locals_of(initialized(0, 1))
    for world in (2, 4):
        for rank in range(world):
            for name, param in initialized(rank, world).items():
                meta = param.meta_info  # type: ignore[attr-defined]
                expected = slice_box(full[name], meta.placement, rank)
                assert torch.equal(param.local, expected), name  # type: ignore[attr-defined]
                assert not meta.need_initialize


def test_each_parameter_and_each_seed_has_its_own_numbers() -> None:
    a, b = locals_of(initialized(0, 1)), locals_of(initialized(0, 1, seed=8))
    first, second = "transformer.h.0.attn.c_attn.weight", "transformer.h.1.attn.c_attn.weight"
    assert not torch.equal(a[first], a[second])
    assert not torch.equal(a[first], b[first])
    assert 0.015 < a[first].std() < 0.025


def test_vectors_are_zeros_for_biases_and_ones_for_norms() -> None:
    weights = locals_of(initialized(0, 1))
    assert weights["transformer.ln_f.weight"].eq(1).all()
    assert weights["transformer.ln_f.bias"].eq(0).all()
    assert weights["transformer.h.0.attn.c_attn.bias"].eq(0).all()


def test_the_callers_random_state_does_not_change() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    initialized(0, 1)
    assert torch.equal(torch.rand(4), expected)


def test_own_init_fn_and_parameters_that_are_initialized_already() -> None:
    with fake_rank(0, 1) as group:
        _, params = planned("LlamaForCausalLM", 1, group)
        norm, head = params["model.norm.weight"], params["lm_head.weight"]
        norm.meta_info.init_fn = partial(nn.init.constant_, val=5.0)  # type: ignore[attr-defined]
        head.meta_info.placement = REPLICATE  # type: ignore[attr-defined]
        head.meta_info.need_initialize = False  # type: ignore[attr-defined]
        initialize_parameters(params, NORMAL, 0, 0, CPU)
    assert norm.local.eq(5).all()  # type: ignore[attr-defined]
    assert head.local.numel() == 0  # type: ignore[attr-defined]


def test_the_dtype_is_the_parameters() -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert all(x.dtype == torch.bfloat16 for x in locals_of(initialized(0, 1)).values())
    finally:
        torch.set_default_dtype(default)


def seeds() -> tuple[int, int]:
    torch.manual_seed(100 + dist.get_rank())
    return common_seed(None, None), common_seed(4, None)


def test_ranks_use_the_seed_of_the_first(ranks) -> None:  # type: ignore[no-untyped-def]
    assert ranks(2).run(seeds) == [(100, 4), (100, 4)]


def test_a_new_head_is_what_the_base_model_lacks() -> None:
    model = tiny_model("LlamaForCausalLM")
    names = [name for name, _ in model.named_parameters()]
    head, base = [n for n in names if not n.startswith("model.")], [n for n in names if n.startswith("model.")]
    assert new_head_parameters(model, head, set(base)) == head == ["lm_head.weight"]
    assert new_head_parameters(model, [*head, base[0]], set(base[1:])) == [], "the base model is incomplete"
    assert new_head_parameters(model, base[:1], {*base[1:], *head}) == []
    assert new_head_parameters(model, [], set(names)) == []


def test_optional_parameters_are_those_that_the_model_names() -> None:
    model = tiny_model("LlamaForCausalLM")
    model._keys_to_ignore_on_load_missing = [r"norm\.weight$"]
    assert optional_parameters(model, ["model.norm.weight", "lm_head.weight"]) == ["model.norm.weight"]


def test_the_models_own_initialization() -> None:
    model = tiny_model("LlamaForCausalLM")
    norm, head = torch.empty(32), torch.empty(96, 32)
    model_init_fn(model, "model.norm.weight")(norm)
    model_init_fn(model, "lm_head.weight")(head)
    assert norm.eq(1).all() and 0.01 < head.std() < 0.03
    assert not torch.equal(head, model.lm_head.weight), "the model itself does not change"
