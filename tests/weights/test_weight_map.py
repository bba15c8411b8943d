"""Finding a checkpoint's tensors, matching them with parameters, and reporting all mismatches in one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from weights.tiny_models import matched, model_on_meta, save, tiny_model

from paraxis.errors import CheckpointError
from paraxis.weights.meta_init import MetaAwareMethodsPatcher, attach_parameter_meta, tied_names
from paraxis.weights.weight_map import OpenFiles, check_checkpoint, collect_weight_map, header_of, match_parameters


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


def test_a_single_file_is_the_entire_checkpoint(tmp_path: Path) -> None:
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


def test_invalid_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an index"):
        collect_weight_map(tmp_path)


def test_invalid_file(tmp_path: Path) -> None:
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
    model = model_on_meta(name)
    params, keys = matched(model, weight_map)
    assert keys == {name: name for name in params}
    check_checkpoint(params, keys, weight_map, tied_names(model))


@pytest.mark.parametrize("saved", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_parameter_under_any_of_its_names(tmp_path: Path, saved: str) -> None:
    folder = save(tiny_model("LlamaForCausalLM", tie_word_embeddings=True), tmp_path)
    weight_map = edit(folder, lambda t: t.__setitem__(saved, t.pop("model.embed_tokens.weight")))
    model = model_on_meta("LlamaForCausalLM", tie_word_embeddings=True)
    params, keys = matched(model, weight_map)
    assert keys["model.embed_tokens.weight"] == saved
    check_checkpoint(params, keys, weight_map, tied_names(model))


def test_a_checkpoint_of_the_base_model_and_of_the_head(tmp_path: Path) -> None:
    model = tiny_model("LlamaForCausalLM", tie_word_embeddings=True)
    base_map = collect_weight_map(save(model.model, tmp_path / "base"))
    head_map = collect_weight_map(save(model, tmp_path / "head"))
    head = model_on_meta("LlamaForCausalLM", tie_word_embeddings=True)
    params, keys = matched(head, base_map)
    assert set(keys) == set(params) and keys["model.norm.weight"] == "norm.weight"
    params, keys = matched(head.model, head_map)
    assert set(keys) == set(params) and keys["norm.weight"] == "model.norm.weight"


def test_names_of_older_checkpoints(tmp_path: Path) -> None:
    """transformers has a table of former names."""
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


def test_modules_that_are_not_of_transformers(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(3, 2))
    params = attach_parameter_meta(model, torch.device("cpu"))
    weight_map = collect_weight_map(tmp_path)
    keys = match_parameters(params, {}, weight_map, model=model)
    assert keys == {"0.weight": "0.weight", "0.bias": "0.bias"}


# -- checking ------------------------------------------------------------------------------------------------


def test_all_mismatches_are_in_one_error(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["lm_head.weight"] = torch.zeros(90, 32)
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    weight_map = edit(save(tiny_model("LlamaForCausalLM"), tmp_path), spoil)
    model = model_on_meta("LlamaForCausalLM")
    params, keys = matched(model, weight_map)
    with pytest.raises(CheckpointError) as error:
        check_checkpoint(params, keys, weight_map, tied_names(model))
    lines = str(error.value).splitlines()[1:]
    assert sorted(lines) == [
        "  - lm_head.weight: shape (90, 32) in the checkpoint, (96, 32) in the model",
        "  - model.layers.0.self_attn.q_proj.weight: F8_E4M3 in the checkpoint, torch.float32 in the model; "
        "the model's configuration has no quantization_config that says how it is quantized",
        "  - model.layers.1.mlp.up_proj.weight: missing in the checkpoint",
        "  - model.norm.weight: missing in the checkpoint",
    ]


def test_a_conversion_between_float_dtypes_is_fine(tmp_path: Path) -> None:
    weight_map = collect_weight_map(save(tiny_model("GPT2LMHeadModel").half(), tmp_path))
    params, keys = matched(model_on_meta("GPT2LMHeadModel"), weight_map)
    check_checkpoint(params, keys, weight_map)


def test_an_index_with_wrong_entries(tmp_path: Path) -> None:
    save(tiny_model("LlamaForCausalLM"), tmp_path, 4)
    index = tmp_path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    files = sorted(set(data["weight_map"].values()))
    moved = data["weight_map"]["model.norm.weight"]
    data["weight_map"]["model.norm.weight"] = next(file for file in files if file != moved)
    index.write_text(json.dumps(data))
    weight_map = collect_weight_map(tmp_path)
    params, keys = matched(model_on_meta("LlamaForCausalLM"), weight_map)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: the index says it is in"):
        check_checkpoint(params, keys, weight_map)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_parameters_with_two_values(tmp_path: Path, equal: bool) -> None:
    def untie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if not equal:
            tensors["lm_head.weight"][-1, -1] += 1

    weight_map = edit(save(tiny_model("LlamaForCausalLM", tie_word_embeddings=True), tmp_path), untie)
    model = model_on_meta("LlamaForCausalLM", tie_word_embeddings=True)
    params, keys = matched(model, weight_map)
    if equal:
        check_checkpoint(params, keys, weight_map, tied_names(model))
    else:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: tied to model\.embed_tokens\.weight"):
            check_checkpoint(params, keys, weight_map, tied_names(model))


def test_headers_are_meta_tensors(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    header = header_of(collect_weight_map(tmp_path))("x")
    assert header.is_meta and header.shape == (2, 3) and header.dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match="the index says it is in 'model.safetensors', where it is not"):
        header_of({"y": str(tmp_path / "model.safetensors")})("y")


def test_files_stay_open_between_reads(tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file({"x": torch.ones(2)}, path)
    with OpenFiles() as files:
        assert files[path] is files[path] and files[path].get_tensor("x").sum() == 2
