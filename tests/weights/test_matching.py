"""Which tensor is which parameter, cached from the previous run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import conversion_mapping
from zoo.cases import find

from paraxis.weights import matching, names
from paraxis.weights.meta_init import tied_names
from paraxis.weights.weight_map import collect_weight_map


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and transformers as in a new process."""
    monkeypatch.setenv("PARAXIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())
    forget(monkeypatch)
    return tmp_path / "cache" / "names"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop what a new process does not have."""
    names._known.clear()
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)


def saved(name: str, folder: Path) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, str]]:
    model: Any = find(name).make()  # type: ignore[operator]
    model.save_pretrained(folder)
    return model, dict(model.named_parameters()), collect_weight_map(folder)


def test_a_cache_hit_does_not_build_the_tables(
    monkeypatch: pytest.MonkeyPatch, untouched: Path, tmp_path: Path
) -> None:
    model, params, weight_map = saved("llama", tmp_path / "model")
    forget(monkeypatch)
    first = matching.match(model, params, tied_names(model), weight_map)
    assert set(first[0]) == set(params) and first[1] == [] and len(list(untouched.iterdir())) == 1
    forget(monkeypatch)
    assert matching.match(model, params, tied_names(model), weight_map) == first
    assert conversion_mapping._checkpoint_conversion_mapping_cache is None

    # Another checkpoint of the same model is a cache miss; the cache may also be disabled.
    forget(monkeypatch)
    fewer = dict(list(weight_map.items())[1:])
    assert len(matching.match(model, params, tied_names(model), fewer)[0]) == len(params) - 1
    forget(monkeypatch)
    assert matching.match(model, params, tied_names(model), weight_map, read_cache=False) == first
    assert conversion_mapping._checkpoint_conversion_mapping_cache is not None


def test_conversions_are_not_cached(monkeypatch: pytest.MonkeyPatch, untouched: Path, tmp_path: Path) -> None:
    model, params, weight_map = saved("mixtral", tmp_path / "model")
    forget(monkeypatch)
    assert matching.match(model, params, tied_names(model), weight_map)[1]
    assert not untouched.exists()


def test_tables_that_the_user_changed_are_used(
    monkeypatch: pytest.MonkeyPatch, untouched: Path, tmp_path: Path
) -> None:
    from transformers.core_model_loading import WeightRenaming

    model, params, weight_map = saved("llama", tmp_path / "model")
    forget(monkeypatch)
    matching.match(model, params, tied_names(model), weight_map)
    own = [WeightRenaming("q_proj", "k_proj"), WeightRenaming("k_proj", "k_proj")]
    conversion_mapping.register_checkpoint_conversion_mapping("llama", own, overwrite=True)
    keys, _ = matching.match(type(model)(model.config), params, tied_names(model), weight_map)
    assert not any("q_proj" in name for name in keys)
