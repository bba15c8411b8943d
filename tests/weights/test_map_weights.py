"""Mapping checkpoints to models: broken ones are an error on all ranks, and a new head is initialized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import context
from models.tiny import build, save
from torch import nn
from weights.checkpoints import INDEX, SINGLE, copy, errors_of, warnings_and_logits

from paraxis import CheckpointError
from paraxis.weights.build import attach
from paraxis.weights.map_weights import check_same_values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save("gpt2", tmp_path_factory.mktemp("good")))


def test_broken_checkpoints_fail_on_all_ranks(ranks: Any, folder: Path, tmp_path: Path) -> None:
    short, noise, index = (Path(copy(folder, tmp_path / name)) for name in ("short", "noise", "index"))
    (short / SINGLE).write_bytes((short / SINGLE).read_bytes()[:-1000])
    (noise / SINGLE).write_bytes(b"\x07" * 5000)
    (index / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": "model-00002-of-00002.safetensors"}}))
    norm = "transformer.h.1.ln_1.weight"
    shape = copy(folder, tmp_path / "shape", **{norm: torch.ones(3)})
    missing = copy(folder, tmp_path / "missing", **{norm: None})
    unexpected = copy(folder, tmp_path / "unexpected", **{"transformer.h.7.ln_1.weight": torch.ones(3)})
    cases = [[str(short)], [str(noise)], [str(index)], [shape], [missing], [unexpected]]
    first, second = ranks(2).run(errors_of, cases)
    assert first == second
    for text, expected in zip(
        first,
        (
            "not a readable safetensors file",
            "not a readable safetensors file",
            "model-00002-of-00002.safetensors",
            f"{norm}: shape (3,) in the checkpoint",
            f"{norm}: missing in the checkpoint",
        ),
        strict=False,
    ):
        assert expected in text
    assert first[-1] == "", "tensors that the model does not have are ignored, as by transformers"


def test_a_new_head_is_initialized_and_named(ranks: Any, tmp_path: Path) -> None:
    """A checkpoint of the base model in a model with a head."""
    build("llama").model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    (first, logits), (second, others) = ranks(2).run(warnings_and_logits, str(tmp_path))
    assert any("lm_head.weight is not in it and will be initialized" in text for text in first)
    assert not any("lm_head" in text for text in second), "one rank warns"
    assert torch.equal(logits, others) and bool(logits.isfinite().all()) and logits.std() > 0


def different_values() -> str:
    torch.manual_seed(torch.distributed.get_rank())
    ctx = context()
    attach(nn.Linear(4, 4), ctx)
    with pytest.raises(CheckpointError) as error:
        check_same_values(ctx)
    return str(error.value)


def test_ranks_that_pass_different_values_fail(ranks: Any) -> None:
    for message in ranks(2).run(different_values):
        assert "2 parameters of rank 1 differ from rank 0's (first weight)" in message
