"""Parameters that a checkpoint stores in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.core_model_loading import Transpose, WeightConverter
from weights.tiny_models import matched, model_on_meta, save, tiny_model

from paraxis.errors import CheckpointError
from paraxis.weights import names as names_module
from paraxis.weights.convert import Conversion, find_conversions
from paraxis.weights.meta_init import tied_names
from paraxis.weights.weight_map import check_checkpoint, collect_weight_map, header_of, open_file


def conversions_of(model: Any, weight_map: dict[str, str]) -> list[Conversion]:
    params = dict(model.named_parameters())
    return find_conversions(
        params, tied_names(model), header_of(weight_map), weight_map, model.base_model_prefix, model
    )


def reader(weight_map: dict[str, str]) -> Any:
    def read(key: str) -> torch.Tensor:
        with open_file(weight_map[key]) as handle:
            return handle.get_tensor(key)

    return read


def test_values_in_another_form_under_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A square weight that is stored transposed fits by name and by shape, and is still not the weight."""
    source = tiny_model("LlamaForCausalLM")
    weight_map = collect_weight_map(save(source, tmp_path))
    transposed = WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", operations=[Transpose(0, 1)])
    monkeypatch.setattr(names_module, "transforms", lambda model: ([], [transposed]))
    model = model_on_meta("LlamaForCausalLM")
    params, keys = matched(model, weight_map)
    assert len(keys) == len(params) - 2
    conversions = conversions_of(model, weight_map)
    check_checkpoint(params, keys, weight_map, {}, conversions)
    values = [conversion.run(reader(weight_map)) for conversion in conversions]
    assert len(values) == 2
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(next(v[name] for v in values if name in v), dict(source.named_parameters())[name].T)


def test_experts_saved_one_by_one(tmp_path: Path) -> None:
    """transformers saves a tensor per expert, and the model has one tensor for all."""
    source = tiny_model("MixtralForCausalLM")
    weight_map = collect_weight_map(save(source, tmp_path))
    model = model_on_meta("MixtralForCausalLM")
    params, keys = matched(model, weight_map)
    conversions = conversions_of(model, weight_map)
    check_checkpoint(params, keys, weight_map, tied_names(model), conversions)
    expected = dict(source.named_parameters())
    values = {n: v for c in conversions for n, v in c.run(reader(weight_map)).items()}
    assert set(values) == set(params) - set(keys)
    assert all(torch.equal(value, expected[name]) for name, value in values.items())


def test_a_conversion_that_does_not_fit(tmp_path: Path) -> None:
    """Found from the headers: there are more experts than the model has."""
    weight_map = collect_weight_map(save(tiny_model("MixtralForCausalLM"), tmp_path))
    model = model_on_meta("MixtralForCausalLM", num_local_experts=2)
    params, keys = matched(model, weight_map)
    with pytest.raises(CheckpointError, match=r"gate_up_proj: stored in another form, as 8 tensors such as .* shape"):
        check_checkpoint(params, keys, weight_map, tied_names(model), conversions_of(model, weight_map))
