"""Building models on the meta device, and attaching metadata to their parameters."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from weights.tiny_models import SIZES, model_on_meta, tiny_model

from paraxis.tensor.sharded_tensor import ShardedTensor
from paraxis.weights.meta_init import (
    MetaAwareMethodsPatcher,
    attach_parameter_meta,
    initialize_parameter_meta,
    move_model_to_device,
    tied_names,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", sorted(SIZES))
def test_parameters_on_meta_buffers_real(name: str) -> None:
    model, real = model_on_meta(name), tiny_model(name)
    ours, theirs = dict(model.named_parameters()), dict(real.named_parameters())
    assert list(ours) == list(theirs)
    for key, param in ours.items():
        assert param.is_meta and type(param) is type(theirs[key])
        assert (param.shape, param.dtype) == (theirs[key].shape, theirs[key].dtype)
        assert param.requires_grad == theirs[key].requires_grad
    buffers = dict(model.named_buffers())
    assert list(buffers) == [key for key, _ in real.named_buffers()]
    for key, value in real.named_buffers():
        assert torch.equal(buffers[key], value), key
    assert tied_names(model) == tied_names(real)


def test_rotary_frequencies_are_computed() -> None:
    rotary = model_on_meta("LlamaForCausalLM").model.rotary_emb
    assert rotary.inv_freq.device == CPU
    assert torch.allclose(rotary.inv_freq, 10000.0 ** (-torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_parameters_stay_tied(tied: bool) -> None:
    model = model_on_meta("LlamaForCausalLM", tie_word_embeddings=tied)
    assert (model.model.embed_tokens.weight is model.lm_head.weight) is tied
    params = attach_parameter_meta(model, CPU)
    assert (model.model.embed_tokens.weight is model.lm_head.weight) is tied
    assert ("lm_head.weight" in params) is not tied
    assert params["model.embed_tokens.weight"].meta_info.is_tied is tied  # type: ignore[attr-defined]


def test_one_parameter_registered_twice_stays_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(3))
            self.first = weight
            self.second = weight
            self.register_parameter("third", weight)
            self.none = None
            self.register_parameter("absent", None)

    with MetaAwareMethodsPatcher():
        module = Twice()
    assert module.first is module.second is module.third
    assert module.first.is_meta and module.absent is None


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_seventy_billion_parameters_take_no_memory_and_no_time() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    before, start = resident(), time.monotonic()
    with MetaAwareMethodsPatcher():
        model = transformers.LlamaForCausalLM(config)
    params = attach_parameter_meta(model, CPU)
    assert time.monotonic() - start < 10
    assert resident() - before < 1.5e9
    assert sum(p.numel() for p in params.values()) > 70e9
    assert sum(p.local.numel() for p in params.values()) == 0  # type: ignore[attr-defined]


def test_a_parameter_larger_than_the_machine() -> None:
    with MetaAwareMethodsPatcher():
        module = nn.Linear(1 << 22, 1 << 22)
        experts = nn.ParameterDict({"w": nn.Parameter(torch.zeros((1 << 10, 1 << 15, 1 << 15)))})
    assert module.weight.shape == (1 << 22, 1 << 22) and module.weight.is_meta
    assert experts["w"].is_meta


def test_deterministic_mode_does_not_touch_the_memory() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        before = resident()
        with MetaAwareMethodsPatcher():
            nn.Linear(1 << 13, 1 << 14)  # half a gigabyte
            inside = torch.utils.deterministic.fill_uninitialized_memory
        assert inside is False and torch.utils.deterministic.fill_uninitialized_memory is True
        assert resident() - before < 2e8
    finally:
        torch.use_deterministic_algorithms(False)


def patched() -> tuple[Any, ...]:
    model = transformers.PreTrainedModel
    return (
        nn.Module.register_parameter,
        model._initialize_weights,
        model.init_weights,
        nn.init.normal_,
        torch.empty,
    )


def test_everything_is_undone() -> None:
    before = patched()
    with MetaAwareMethodsPatcher():
        assert patched() != before
        with MetaAwareMethodsPatcher():
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
    assert patched() == before
    with pytest.raises(ZeroDivisionError), MetaAwareMethodsPatcher():
        _ = 1 // 0
    assert patched() == before
    assert not nn.Linear(2, 2).weight.is_meta
    assert tiny_model("LlamaForCausalLM").model.norm.weight.tolist() == [1.0] * 32


def test_the_same_patcher_may_be_entered_again() -> None:
    before, patcher = patched(), MetaAwareMethodsPatcher()
    for _ in range(2):
        with patcher, patcher:
            assert nn.Linear(2, 2).weight.is_meta
    assert patched() == before


def test_other_threads_are_not_affected() -> None:
    devices = []
    with MetaAwareMethodsPatcher():
        thread = threading.Thread(target=lambda: devices.append(nn.Linear(2, 2).weight.device.type))
        thread.start()
        thread.join()
    assert devices == ["cpu"]


def test_classes_and_attributes_of_parameters_survive() -> None:
    class Marked(nn.Parameter):
        pass

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = Marked(torch.ones(2, 3), requires_grad=False)
            weight.note = "survives"  # type: ignore[attr-defined]
            self.weight = weight
            self.lazy = nn.LazyLinear(4)

    with MetaAwareMethodsPatcher():
        module = Holder()
    assert type(module.weight) is Marked and module.weight.is_meta and not module.weight.requires_grad
    assert module.weight.note == "survives"  # type: ignore[attr-defined]
    assert isinstance(module.lazy.weight, nn.UninitializedParameter)


# -- parameter metadata --------------------------------------------------------------------------------------


def test_attached_parameters() -> None:
    model = model_on_meta("GPT2LMHeadModel", dtype=None)
    model.transformer.ln_f.bias.requires_grad_(False)
    params = attach_parameter_meta(model, CPU)
    assert list(params) == [name for name, _ in model.named_parameters()]
    for name, param in model.named_parameters():
        assert isinstance(param, nn.Parameter) and isinstance(param, ShardedTensor)
        meta = param.meta_info
        assert param.spec is meta and params[name] is param
        assert (meta.name, meta.shape, meta.dtype) == (name, tuple(param.shape), param.dtype)
        assert meta.need_initialize and meta.placement is None and meta.source is None and meta.group is None
        assert param.local.numel() == 0
        assert param.requires_grad is (name != "transformer.ln_f.bias")


def test_real_weights_become_the_source() -> None:
    model = tiny_model("GPT2LMHeadModel")
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    params = attach_parameter_meta(model, CPU)
    for name, value in values.items():
        source = params[name].meta_info.source  # type: ignore[attr-defined]
        assert torch.equal(source, value) and not source.requires_grad


def test_steps_in_either_order_and_repeated() -> None:
    orders = [
        [initialize_parameter_meta, lambda m: move_model_to_device(m, CPU)],
        [lambda m: move_model_to_device(m, CPU), initialize_parameter_meta],
    ]
    for steps in orders:
        model = model_on_meta("OPTForCausalLM")
        for step in steps:
            step(model)
        params = dict(model.named_parameters())
        metas = {name: param.meta_info for name, param in params.items()}
        assert all(isinstance(param, ShardedTensor) for param in params.values())
        assert {name: meta.name for name, meta in metas.items()} == {name: name for name in params}
        for step in [*steps, *steps]:
            step(model)
        assert all(param is params[name] for name, param in model.named_parameters())
        group = object()
        attach_parameter_meta(model, CPU, group)  # type: ignore[arg-type]
        for name, param in model.named_parameters():
            assert param.meta_info is metas[name] and param.meta_info.group is group


def test_metadata_from_before_survives_with_real_weights() -> None:
    model = nn.Linear(3, 2)
    value = model.weight.detach().clone()
    initialize_parameter_meta(model)
    meta = model.weight.meta_info
    move_model_to_device(model, CPU)
    assert model.weight.meta_info is meta and torch.equal(meta.source, value)


def test_modules_with_a_list_of_their_parameters_are_updated() -> None:
    model = nn.LSTM(4, 4)
    attach_parameter_meta(model, CPU)
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters()))
    assert all(isinstance(p, ShardedTensor) for p in model._flat_weights)


def test_a_buffer_without_values_is_an_error() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"buffer `0\.running_mean` is on meta"):
        attach_parameter_meta(model, CPU)


def test_shared_buffers_stay_shared() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.ones(2))
            self.register_buffer("b", self.a)

    model = Shares()
    attach_parameter_meta(model, torch.device("meta"))
    assert model.a.is_meta and model.a is model.b
