"""From keys of a checkpoint to names of parameters."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming
from weights.tiny_models import tiny_model

from paraxis.weights import names as names_module
from paraxis.weights.names import CheckpointNames, transforms

NAMES = ["model.norm.weight", "model.layers.0.up.weight", "lm_head.weight"]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> CheckpointNames:
    found: Any = (
        [WeightRenaming("gamma", "weight")],
        [WeightConverter("up.stored", "up.weight", operations=[Transpose(0, 1)])],
    )
    monkeypatch.setattr(names_module, "transforms", lambda model: found)
    return CheckpointNames(NAMES, "model", None)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("norm.weight", "model.norm.weight"),
        ("model.lm_head.weight", "lm_head.weight"),
        ("norm.gamma", "model.norm.weight"),
        ("layers.0.up.stored", None),
        ("other.weight", None),
    ],
    ids=["same", "without prefix", "with prefix", "renamed", "converted", "unknown"],
)
def test_names_of_keys(names: CheckpointNames, key: str, name: str | None) -> None:
    assert names.of(key) == name


def test_converted_keys_name_their_parameter(names: CheckpointNames) -> None:
    found = names.converted("model.layers.0.up.stored")
    assert found is not None and found[0] == "model.layers.0.up.weight"
    assert names.converted("model.norm.weight") is None


def test_transforms_are_cached_per_model() -> None:
    model = tiny_model("MixtralForCausalLM")
    assert transforms(model) is transforms(model) and transforms(model)[1]
    assert transforms(nn.Linear(2, 2)) == transforms(None) == ([], [])
