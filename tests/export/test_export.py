"""Exported plans, run by the libraries that they are for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from zoo.cases import find
from zoo.exports import LIMIT, in_torch, in_transformers

from paraxis.cli import app
from paraxis.export import NotExportable, export_plan
from ranks import RankPool

Ranks = Callable[[int], RankPool]


def saved(name: str, folder: Path) -> str:
    """A tiny model of the zoo with random weights."""
    find(name).make().save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def call(*args: str) -> Any:
    result = CliRunner().invoke(app, ["export", *args])
    torch._dynamo.reset()
    return result


def exported(folder: str, world: int, target: str) -> Any:
    torch._dynamo.reset()
    return export_plan(folder, world, target)


def agree(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["logits"] <= LIMIT and result["tokens"] == "same", result


def test_from_the_command_line(tmp_path: Path, ranks: Ranks) -> None:
    """opt has no plan in transformers; it has biases, learned positions and tied embeddings."""
    folder, out = saved("opt", tmp_path / "model"), tmp_path / "plan.json"
    result = call(folder, "--tp", "2", "--json", "--out", str(out))
    assert result.exit_code == 0, result.output
    data, plan = json.loads(result.stdout), json.loads(out.read_text())
    assert plan == {key: data[key] for key in ("tp_plan", "base_model_tp_plan")}
    assert plan["tp_plan"]["model.decoder.layers.*.fc1"] == "colwise"
    assert plan["base_model_tp_plan"]["decoder.layers.*.fc2"] == "rowwise"
    assert not data["ships_plan"] and data["verified"] and data["error"] < LIMIT
    results = ranks(2).run(in_transformers, "opt", folder, plan["tp_plan"])
    agree(results)
    assert results[0]["share"] == pytest.approx(data["sharded_fraction"], abs=0.02)


def test_for_torch(tmp_path: Path, ranks: Ranks) -> None:
    folder = saved("gpt_neox", tmp_path)
    found = exported(folder, 2, "torch")
    assert found.plan["gpt_neox.layers.*.attention.dense"] == "RowwiseParallel()"
    agree(ranks(2).run(in_torch, "gpt_neox", folder, found.source))


def test_nothing_to_export(tmp_path: Path) -> None:
    """Of gpt2 only the embedding is a layer that others shard, and its 251 rows are not divisible by 2."""
    folder = saved("gpt2[vocab_size=251,n_positions=127]", tmp_path)
    result = call(folder, "--tp", "2")
    assert result.exit_code == 1
    text = " ".join(result.stderr.split())
    assert "transformer.h.*.attn.c_attn: Conv1D" in text and "transformer.wte" in text and "251" in text
    assert "Traceback" not in text


def test_wrong_use() -> None:
    result = call("org/model", "--format", "gguf")
    assert result.exit_code == 2 and "gguf" in result.output
    with pytest.raises(ValueError, match="two ranks"):
        export_plan("org/model", 1)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "llama[num_key_value_heads=1]",
        "llama[num_attention_heads=6,num_key_value_heads=3,hidden_size=48]",
        "llama[vocab_size=250]",
        "qwen2[num_key_value_heads=2]",
        "mixtral[num_key_value_heads=2,intermediate_size=100]",
        "gemma2",
        "phi3",
        "bloom",
        "falcon",
        "gpt2",
        "mamba",
        "deepseek_v3",
        "gpt_oss",
        "hrm_text",
    ],
)
def test_sizes_and_ranks(name: str, world: int, tmp_path: Path, ranks: Ranks) -> None:
    """Whatever is exported is exact, and what is not is named."""
    folder = saved(name, tmp_path)
    for target, run in (("transformers", in_transformers), ("torch", in_torch)):
        try:
            found = exported(folder, world, target)
        except NotExportable as error:
            assert "." in str(error)
            continue
        what: Any = found.source or found.plan
        agree(ranks(world).run(run, name, folder, what))


@pytest.mark.long
def test_for_vllm(tmp_path: Path) -> None:
    """Only its two documented styles, with the names of the base model; refused if KV heads are not divisible."""
    found = exported(saved("llama", tmp_path / "a"), 2, "vllm")
    assert set(found.plan.values()) == {"colwise", "rowwise"} and "layers.*.self_attn.o_proj" in found.plan
    with pytest.raises(NotExportable, match="self_attn"):
        exported(saved("llama[num_key_value_heads=1]", tmp_path / "b"), 2, "vllm")
