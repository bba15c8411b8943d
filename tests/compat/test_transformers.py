"""Private and version-dependent names of transformers, on tiny models."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from models import tiny
from torch import nn

from paraxis.compat import transformers as compat


def test_every_name_exists() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__)


def test_logger_methods_include_those_of_transformers() -> None:
    import logging

    methods = compat.logger_methods()
    assert logging.Logger.warning in methods and len(methods) >= 6, "with those that transformers adds"


def test_output_hooks_are_for_models_of_transformers() -> None:
    model = tiny.build("llama")
    compat.install_output_hooks(model)
    compat.install_output_hooks(nn.Linear(2, 2))
    with torch.no_grad():
        output = model(torch.ones(1, 2, dtype=torch.long), output_hidden_states=True)
    assert len(output.hidden_states) == 3


def test_weights_are_initialized_by_the_model() -> None:
    owner, name = compat.initialize_weights_slot()
    assert issubclass(type(tiny.build("llama")), owner) and callable(getattr(owner, name))
    model = tiny.build("llama")
    initialize = compat.init_weights_of(model)
    assert initialize is not None and compat.init_weights_of(nn.Linear(2, 2)) is None
    layer = nn.Linear(64, 64)
    layer.weight.data.zero_()
    initialize(layer)
    assert float(layer.weight.detach().std()) > 0


def test_dtypes_that_a_class_demands() -> None:
    model = tiny.build("llama")
    names = [name for name, _ in model.named_parameters()]
    assert compat.dtype_by_name(model, torch.float16, names) == {}
    model._keep_in_fp32_modules_strict = {"norm"}
    model._get_dtype_plan = lambda dtype: {"norm": torch.float32}
    demanded = compat.dtype_by_name(model, torch.bfloat16, names)
    assert demanded and all("norm" in name and dtype == torch.float32 for name, dtype in demanded.items())


def test_attention_implementations() -> None:
    config = tiny.config("llama")
    compat.set_attention_implementation(config, "eager")
    assert compat.attention_implementation(config) == "eager" == compat.implementations(config)[0]
    assert compat.attention_implementation(SimpleNamespace()) is None
    assert compat.supports_attention_interface(tiny.build("llama")) and not compat.supports_attention_interface(None)


def test_checkpoint_conversions() -> None:
    model = tiny.build("llama")
    renamings, conversions = compat.checkpoint_conversions(model)
    assert all(hasattr(x, "rename_source_key") for x in (*renamings, *conversions))
    assert compat.conversion_tables_are_built() and "transformers.conversion_mapping" in sys.modules
    state = dict(model.state_dict())
    assert compat.revert_weight_conversion(model, state).keys() == state.keys()


def test_keys_that_checkpoints_need_not_have() -> None:
    model = SimpleNamespace(_keys_to_ignore_on_save=["a"], _keys_to_ignore_on_load_missing=["b"])
    assert list(compat.keys_to_ignore_on_save(model)) == ["a"] and list(compat.keys_to_ignore_on_load(model)) == ["b"]
    assert list(compat.keys_to_ignore_on_save(None)) == list(compat.keys_to_ignore_on_load(None)) == []


def test_other_features() -> None:
    assert {"colwise", "rowwise"} <= compat.parallel_styles()
    assert isinstance(compat.merges_parallel_plans(), bool)
    assert compat.grouped_mm_fallback() is None or compat.grouped_mm_fallback().namespace == "transformers"
    assert not compat.has_adapters_loaded(tiny.build("llama"))


def test_padding_is_masked_without_a_look_at_the_mask_where_asked() -> None:
    import transformers.masking_utils as masking

    before, applies = getattr(masking, "fast_all", None), [False]
    if before is None:
        pytest.skip("this version of transformers does not look")
    masking.fast_all = getattr(before, "_looks", before)  # another test may have captured a model
    try:
        compat.always_mask_padding(lambda: applies[0])
        assert masking.fast_all(torch.ones(3, dtype=torch.bool))
        applies[0] = True
        assert masking.fast_all(torch.ones(3, dtype=torch.bool)) is False
    finally:
        masking.fast_all = before


def test_collectors_nest_while_traced() -> None:
    """The outer model's hooks run after an inner model that collects outputs too."""
    from transformers import GitConfig, GitForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    model = GitForCausalLM(GitConfig(vision_config=vision, vocab_size=32, pad_token_id=0, **sizes)).eval()
    compat.install_output_hooks(model)
    inputs = {"input_ids": torch.ones(1, 4, dtype=torch.long), "pixel_values": torch.ones(1, 3, 16, 16)}
    options = {"output_hidden_states": True, "use_cache": False}
    expected = model(**inputs, **options)
    traced = torch.compile(lambda: model(**inputs, **options), backend="eager", fullgraph=True)()
    assert len(traced.hidden_states) == len(expected.hidden_states) == 2
    assert all(map(torch.allclose, traced.hidden_states, expected.hidden_states))
    torch._dynamo.reset()


def test_output_hooks_are_installed_once() -> None:
    """Also if a part of the model has them already: a backbone that needs its own hidden states."""
    ids = torch.tensor([[1, 2, 3]])
    plain, model = tiny.build("llama"), tiny.build("llama")
    right = plain(ids, output_hidden_states=True).hidden_states
    model.model(ids, output_hidden_states=True)
    compat.install_output_hooks(model)
    compat.install_output_hooks(model)
    for found in (model(ids, output_hidden_states=True), model.model(ids, output_hidden_states=True)):
        assert [x.shape for x in found.hidden_states] == [x.shape for x in right]
        assert all(torch.equal(x, y) for x, y in zip(found.hidden_states, right, strict=True))
