"""Finding a checkpoint's tensors, matching them with parameters, and saying what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.core_model_loading import Transpose, WeightConverter
from weights.tiny_models import save, tiny_config, tiny_model

from paraxis.errors import CheckpointError
from paraxis.weights import names as names_module
from paraxis.weights.convert import Conversion, find_conversions
from paraxis.weights.meta_init import MetaAwareMethodsPatcher, attach_parameter_meta, tied_names
from paraxis.weights.weight_map import check_checkpoint, collect_weight_map, header_of, match_parameters, open_file


def empty(name: str, **overrides: Any) -> Any:
    with MetaAwareMethodsPatcher():
        return getattr(transformers, name)(tiny_config(name, **overrides))


def matched(model: Any, weight_map: dict[str, str]) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    params = attach_parameter_meta(model, torch.device("cpu"))
    return params, match_parameters(params, tied_names(model), weight_map, model.base_model_prefix, model)


def edit(folder: Path, change: Any) -> dict[str, str]:
    """Change the tensors of a checkpoint of one file; returns its weight map."""
    file = folder / "model.safetensors"
    tensors = dict(load_file(file))
    change(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, file, metadata={"format": "pt"})
    return collect_weight_map(folder)


# -- collecting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 4])
def test_one_file_or_several(tmp_path: Path, files: int) -> None:
    model = tiny_model("LlamaForCausalLM")
    weight_map = collect_weight_map(save(model, tmp_path, files))
    assert set(weight_map) == {name for name, _ in model.named_parameters()}
    assert all(Path(file).is_absolute() for file in weight_map.values())
    assert (len(set(weight_map.values())) > 1) is (files > 1)
    index = tmp_path / "model.safetensors.index.json"
    if files > 1:  # the same without the index
        index.unlink()
        assert collect_weight_map(tmp_path) == weight_map


def test_a_single_file_counts_whatever_lies_beside_it(tmp_path: Path) -> None:
    weight_map = collect_weight_map(save(tiny_model("GPT2LMHeadModel"), tmp_path))
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert collect_weight_map(tmp_path) == weight_map


def test_no_safetensors_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights at all"):
        collect_weight_map(tmp_path)
    for name in ("pytorch_model.bin", "tf_model.h5", "training_args.bin"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin, tf_model\.h5\).*save_pretrained"):
        collect_weight_map(tmp_path)


def test_index_with_missing_files(tmp_path: Path) -> None:
    weight_map = collect_weight_map(save(tiny_model("LlamaForCausalLM"), tmp_path, 4))
    gone = sorted(set(weight_map.values()))[1]
    Path(gone).unlink()
    with pytest.raises(CheckpointError, match=f"names 1 files that are not there: {Path(gone).name}"):
        collect_weight_map(tmp_path)


def test_index_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an index"):
        collect_weight_map(tmp_path)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version of a pointer to a file that was not fetched")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*not a readable safetensors file"):
        collect_weight_map(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"'x' is both in .*a\.safetensors.*b\.safetensors"):
        collect_weight_map(tmp_path)


# -- matching ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BloomForCausalLM", "OPTForCausalLM"])
def test_exact_names(tmp_path: Path, name: str) -> None:
    weight_map = collect_weight_map(save(tiny_model(name), tmp_path))
    model = empty(name)
    params, keys = matched(model, weight_map)
    assert keys == {name: name for name in params}
    check_checkpoint(params, keys, weight_map, tied_names(model))


@pytest.mark.parametrize("saved", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_parameter_under_any_of_its_names(tmp_path: Path, saved: str) -> None:
    folder = save(tiny_model("LlamaForCausalLM", tie_word_embeddings=True), tmp_path)
    weight_map = edit(folder, lambda t: t.__setitem__(saved, t.pop("model.embed_tokens.weight")))
    model = empty("LlamaForCausalLM", tie_word_embeddings=True)
    params, keys = matched(model, weight_map)
    assert keys["model.embed_tokens.weight"] == saved
    check_checkpoint(params, keys, weight_map, tied_names(model))


def test_a_checkpoint_of_the_base_model_and_of_the_head(tmp_path: Path) -> None:
    whole = tiny_model("LlamaForCausalLM", tie_word_embeddings=True)
    base_map = collect_weight_map(save(whole.model, tmp_path / "base"))
    head_map = collect_weight_map(save(whole, tmp_path / "head"))
    head = empty("LlamaForCausalLM", tie_word_embeddings=True)
    params, keys = matched(head, base_map)
    assert set(keys) == set(params) and keys["model.norm.weight"] == "norm.weight"
    params, keys = matched(head.model, head_map)
    assert set(keys) == set(params) and keys["norm.weight"] == "model.norm.weight"


def test_names_of_older_checkpoints(tmp_path: Path) -> None:
    """transformers knows how the parts of this model were called in older versions."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=32)
    folder = save(transformers.BertForMaskedLM(config), tmp_path)

    def age(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            old = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(key)

    weight_map = edit(folder, age)
    assert any(key.endswith("gamma") for key in weight_map)
    with MetaAwareMethodsPatcher():
        model = transformers.BertForMaskedLM(config)
    params, keys = matched(model, weight_map)
    assert keys["bert.embeddings.LayerNorm.weight"] == "bert.embeddings.LayerNorm.gamma"
    check_checkpoint(params, keys, weight_map, tied_names(model))


def test_what_is_not_a_transformers_model(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(3, 2))
    params = attach_parameter_meta(model, torch.device("cpu"))
    weight_map = collect_weight_map(tmp_path)
    keys = match_parameters(params, {}, weight_map, model=model)
    assert keys == {"0.weight": "0.weight", "0.bias": "0.bias"}


# -- checking ------------------------------------------------------------------------------------------------


def test_everything_wrong_is_in_one_error(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["lm_head.weight"] = torch.zeros(90, 32)
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    weight_map = edit(save(tiny_model("LlamaForCausalLM"), tmp_path), spoil)
    model = empty("LlamaForCausalLM")
    params, keys = matched(model, weight_map)
    with pytest.raises(CheckpointError) as error:
        check_checkpoint(params, keys, weight_map, tied_names(model))
    lines = str(error.value).splitlines()[1:]
    assert sorted(lines) == [
        "  - lm_head.weight: shape (90, 32) in the checkpoint, (96, 32) in the model",
        "  - model.layers.0.self_attn.q_proj.weight: F8_E4M3 in the checkpoint, torch.float32 in the model; "
        "quantized weights are not read",
        "  - model.layers.1.mlp.up_proj.weight: missing in the checkpoint",
        "  - model.norm.weight: missing in the checkpoint",
    ]


def test_a_conversion_between_float_dtypes_is_fine(tmp_path: Path) -> None:
    weight_map = collect_weight_map(save(tiny_model("GPT2LMHeadModel").half(), tmp_path))
    params, keys = matched(empty("GPT2LMHeadModel"), weight_map)
    check_checkpoint(params, keys, weight_map)


def test_an_index_that_does_not_tell_the_truth(tmp_path: Path) -> None:
    save(tiny_model("LlamaForCausalLM"), tmp_path, 4)
    index = tmp_path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    files = sorted(set(data["weight_map"].values()))
    moved = data["weight_map"]["model.norm.weight"]
    data["weight_map"]["model.norm.weight"] = next(file for file in files if file != moved)
    index.write_text(json.dumps(data))
    weight_map = collect_weight_map(tmp_path)
    params, keys = matched(empty("LlamaForCausalLM"), weight_map)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: the index says it is in"):
        check_checkpoint(params, keys, weight_map)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_parameters_with_two_values(tmp_path: Path, equal: bool) -> None:
    def untie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if not equal:
            tensors["lm_head.weight"][-1, -1] += 1

    weight_map = edit(save(tiny_model("LlamaForCausalLM", tie_word_embeddings=True), tmp_path), untie)
    model = empty("LlamaForCausalLM", tie_word_embeddings=True)
    params, keys = matched(model, weight_map)
    if equal:
        check_checkpoint(params, keys, weight_map, tied_names(model))
    else:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: tied to model\.embed_tokens\.weight"):
            check_checkpoint(params, keys, weight_map, tied_names(model))


def converted(model: Any, weight_map: dict[str, str]) -> list[Conversion]:
    params = dict(model.named_parameters())
    return find_conversions(
        params, tied_names(model), header_of(weight_map), weight_map, model.base_model_prefix, model
    )


def test_values_in_another_form_under_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A square weight that is stored transposed fits by name and by shape, and is still not the weight."""
    source = tiny_model("LlamaForCausalLM")
    weight_map = collect_weight_map(save(source, tmp_path))
    turned = WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", operations=[Transpose(0, 1)])
    monkeypatch.setattr(names_module, "transforms", lambda model: ([], [turned]))
    model = empty("LlamaForCausalLM")
    params, keys = matched(model, weight_map)
    assert len(keys) == len(params) - 2
    conversions = converted(model, weight_map)
    check_checkpoint(params, keys, weight_map, {}, conversions)
    values = [conversion.run(read_whole(weight_map)) for conversion in conversions]
    assert len(values) == 2
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(next(v[name] for v in values if name in v), dict(source.named_parameters())[name].T)


def test_experts_saved_one_by_one(tmp_path: Path) -> None:
    """transformers saves each expert by itself, and the model has them in one tensor."""
    source = tiny_model("MixtralForCausalLM")
    weight_map = collect_weight_map(save(source, tmp_path))
    model = empty("MixtralForCausalLM")
    params, keys = matched(model, weight_map)
    conversions = converted(model, weight_map)
    check_checkpoint(params, keys, weight_map, tied_names(model), conversions)
    expected = dict(source.named_parameters())
    values = {n: v for c in conversions for n, v in c.run(read_whole(weight_map)).items()}
    assert set(values) == set(params) - set(keys)
    assert all(torch.equal(value, expected[name]) for name, value in values.items())


def test_a_conversion_that_does_not_fit(tmp_path: Path) -> None:
    """Found from the headers: one expert of another width, and one that is not there."""
    weight_map = collect_weight_map(save(tiny_model("MixtralForCausalLM"), tmp_path))
    model = empty("MixtralForCausalLM", num_local_experts=2)
    params, keys = matched(model, weight_map)
    with pytest.raises(CheckpointError, match=r"gate_up_proj: stored in another form, as 8 tensors such as .* shape"):
        check_checkpoint(params, keys, weight_map, tied_names(model), converted(model, weight_map))


def read_whole(weight_map: dict[str, str]) -> Any:
    def read(key: str) -> torch.Tensor:
        with open_file(weight_map[key]) as handle:
            return handle.get_tensor(key)

    return read
