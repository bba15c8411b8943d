"""Arguments of ``from_pretrained``: each has its effect or an answer, and a typing error a suggestion."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.compare import batch, context, max_difference
from safetensors.torch import load_file, save_file
from weights.homemade import save_homemade
from weights.tiny_models import save, tiny_model

from paraxis import parallelize_model, plan_model
from paraxis.errors import CheckpointError
from paraxis.weights.build import build_model
from paraxis.weights.pretrained_options import (
    ANSWERS,
    WITHOUT_EFFECT,
    names_of_options,
    split_pretrained_options,
)


def test_every_argument_of_from_pretrained_is_known() -> None:
    """Those of its signature, and those that its source takes out of ``kwargs``."""
    from_pretrained = transformers.PreTrainedModel.from_pretrained
    source = inspect.getsource(from_pretrained)
    arguments = set(re.findall(r'kwargs\.pop\("(\w+)"', source))
    arguments |= {p.name for p in inspect.signature(from_pretrained).parameters.values() if p.kind is p.KEYWORD_ONLY}
    known = {*ANSWERS, *WITHOUT_EFFECT, *names_of_options()}
    assert len(arguments) > 20 and not arguments - known


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_arguments_without_their_effect_are_answered(name: str) -> None:
    assert split_pretrained_options({name: None})[1] == split_pretrained_options({name: False})[1] == {}
    with pytest.raises(TypeError, match=name):
        split_pretrained_options({name: "auto"})


def test_taking_options() -> None:
    passed = {"torch_dtype": "bfloat16", "token": True, "low_cpu_mem_usage": True, "use_safetensors": True, "n": 3}
    options, others = split_pretrained_options(passed)
    assert (options.dtype, options.token, others) == ("bfloat16", True, {"n": 3})
    both, _ = split_pretrained_options({"torch_dtype": "bfloat16", "dtype": "float64"})
    assert both.dtype == "float64"
    assert not options.trust_remote_code, "never implied"
    with pytest.raises(TypeError, match="use_safetensors=False"):
        split_pretrained_options({"use_safetensors": False})
    for folder in ("../other", "/etc", "a/../../b"):
        with pytest.raises(ValueError, match="leads out"):
            split_pretrained_options({"subfolder": folder})


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("memory_limt", "memory_limit"),
        ("trust_remote_cod", "trust_remote_code"),
        ("num_hiden_layers", "num_hidden_layers"),
    ],
)
def test_a_typing_error_gets_a_suggestion(tmp_path: Path, typed: str, meant: str) -> None:
    folder = save(tiny_model("LlamaForCausalLM"), tmp_path)
    with pytest.raises(TypeError, match=f"unknown option '{typed}': did you mean {meant}"):
        build_model(folder, (), None, {typed: 3})
    with pytest.raises(TypeError, match=f"unknown option '{typed}': did you mean {meant}"):
        plan_model(str(folder), 2, **{typed: 3})
    with pytest.raises(TypeError, match=r"unknown option 'xyzzy': .*LlamaForCausalLM\(\)"):
        build_model(folder, (), None, {"xyzzy": 3})


def test_auto_is_the_dtype_of_the_checkpoint_where_the_configuration_has_none(tmp_path: Path) -> None:
    folder = save(tiny_model("LlamaForCausalLM").bfloat16(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    for dtype in (None, "auto"):
        assert next(build_model(folder, (), dtype, {}).parameters()).dtype == expected == torch.bfloat16


def logits(folder: str, options: dict[str, Any]) -> tuple[torch.Tensor, str, str]:
    model = parallelize_model(folder, context(), **options)
    ids, _ = batch(64)
    with torch.no_grad():
        found = model(input_ids=ids).logits
    return found, str(model.dtype), str(model.config._attn_implementation)


def several_logits(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the model gives with each of several sets of options, or the error."""
    found: dict[str, Any] = {}
    for name, options in cases.items():
        try:
            found[name] = logits(folder, options)
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    return found


def test_options_have_the_effect_that_they_have_in_from_pretrained(tmp_path: Path, ranks: Any) -> None:
    """The same options give the same model; a variant and a subfolder with other weights than the plain one."""
    root = save(tiny_model("LlamaForCausalLM"), tmp_path / "model")
    save(tiny_model("LlamaForCausalLM"), root / "inner" / "model")
    weights = root / "inner" / "model" / "model.safetensors"
    save_file({k: v * 2 for k, v in load_file(weights).items()}, weights, metadata={"format": "pt"})
    other = {k: v * 3 for k, v in load_file(root / "model.safetensors").items()}
    save_file(other, root / "model.big.safetensors", metadata={"format": "pt"})
    shutil.copy(root / "model.big.safetensors", root / "other.safetensors")
    config = transformers.LlamaConfig.from_pretrained(root, num_hidden_layers=1)
    explicit = transformers.LlamaConfig.from_pretrained(root)
    explicit.transformers_weights = "other.safetensors"
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "variant": {"variant": "big", "low_cpu_mem_usage": True},
        "subfolder": {"subfolder": "inner/model"},
        "config": {"config": config, "device_map": None},
        "explicit": {"config": explicit},
        "dtype": {"dtype": "float64", "attn_implementation": "eager"},
    }
    refused = {
        "device_map": {"device_map": "auto"},
        "no variant": {"variant": "small"},
        "no folder": {"subfolder": "absent"},
    }
    right = {}
    for name, options in cases.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(root, **options)
        with torch.no_grad():
            right[name] = (model(input_ids=batch(64)[0]).logits, str(model.dtype), model.config._attn_implementation)
    assert max_difference(right["variant"][0], right["plain"][0]) > 1e-2
    assert max_difference(right["subfolder"][0], right["plain"][0]) > 1e-2
    for found in ranks(2).run(several_logits, str(root), {**cases, **refused}):
        for name, (expected, dtype, attention) in right.items():
            assert not isinstance(found[name], str), (name, found[name])
            assert max_difference(found[name][0], expected) < 1e-4, name
            assert found[name][1:] == (dtype, attention), name
        assert "device_map is not needed" in found["device_map"]
        assert "model.small.safetensors" in found["no variant"] and "model.big.safetensors" in found["no variant"]
        assert "there is no directory" in found["no folder"]


# -- code that comes with a model ---------------------------------------------------------------------------------


@pytest.fixture
def homemade(tmp_path: Path) -> Path:
    """A model whose code is in its folder."""
    return save_homemade(tmp_path / "homemade")


def run_with_and_without_trust(folder: str) -> tuple[torch.Tensor, bool, str]:
    with pytest.raises(CheckpointError) as caught:
        parallelize_model(folder, context())
    ids = torch.arange(12).view(2, 6)
    model = parallelize_model(folder, context(), example_inputs={"input_ids": ids}, trust_remote_code=True)
    with torch.no_grad():
        found = model(input_ids=ids).logits
    return found, model.up.weight.to_local().shape == (64, 32), str(caught.value)


def test_code_that_comes_with_a_model_runs_if_it_is_trusted(homemade: Path, ranks: Any) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(homemade, trust_remote_code=True)
    right = reference(input_ids=torch.arange(12).view(2, 6)).logits
    for found, sharded, message in ranks(2).run(run_with_and_without_trust, str(homemade)):
        assert sharded and max_difference(found, right.detach()) < 1e-4
        assert "trust_remote_code=True" in message and "configuration_homemade.HomemadeConfig" in message


def test_nothing_is_asked_on_the_terminal(homemade: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any) -> str:
        raise AssertionError("asked")

    monkeypatch.setattr("builtins.input", ask)
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        build_model(homemade, (), None, {})
    config = json.loads((homemade / "config.json").read_text())
    config |= {"model_type": "llama"}  # transformers has this configuration, and not the class
    config["auto_map"].pop("AutoConfig")
    (homemade / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="modeling_homemade.HomemadeForCausalLM.*trust_remote_code=True"):
        build_model(homemade, (), None, {})
