"""What a configuration says of modules, and boxes in units of several indices."""

from __future__ import annotations

import pytest
import torch

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.format import Quantization, Rule, covering, elements, scalar_problem
from paraxis.weights.quantized.fp8 import BlockFP8

FIRST, SECOND = BlockFP8((16, 16)), BlockFP8((32, 32))


def test_names_of_modules() -> None:
    found = Quantization("q", [Rule(FIRST)], ["lm_head", "layers.0.mlp", "vision", "model.layers.*.gate"])
    assert found.format_of("model.layers.1.mlp.up_proj") is FIRST
    for name in ("lm_head", "model.layers.0.mlp.up_proj", "model.vision.block.fc", "model.layers.3.gate"):
        assert found.format_of(name) is None
    assert found.format_of("model.layers.10.mlp.up_proj") is FIRST and found.format_of("x.revision") is FIRST


def test_patterns_of_modules() -> None:
    """Globs, and regular expressions that name a module or one that it is inside of, as in transformers."""
    found = Quantization("q", [Rule(FIRST)], ["*.self_attn*", r"model.layers.[0-2]"])
    for name in ("model.layers.7.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.2"):
        assert found.format_of(name) is None
    assert found.format_of("model.layers.7.mlp.up_proj") is FIRST
    assert found.format_of("model.layers.17.mlp.up_proj") is FIRST
    for wrong in (["re:*x"], ["model.("]):
        with pytest.raises(CheckpointError, match="is no .*pattern"):
            Quantization("q", [Rule(FIRST)], wrong).format_of("a")


def test_targets_of_rules() -> None:
    rules = [Rule(FIRST, [r"re:.*experts\..*"]), Rule(SECOND, ["Linear"])]
    found = Quantization("q", rules, ["re:.*self_attn.*", "lm_head"], loose=False)
    assert found.format_of("model.layers.0.mlp.experts.3.up_proj") is FIRST
    assert found.format_of("model.layers.0.mlp.up_proj") is SECOND and found.formats == [FIRST, SECOND]
    assert found.format_of("model.layers.0.self_attn.q_proj") is None and found.format_of("lm_head") is None
    assert found.format_of("model.embed_tokens", "Embedding") is None
    assert found.format_of("model.lm_head.proj") is SECOND  # names are exact


def test_covering_boxes() -> None:
    outer, chosen = covering(((3, 6), (9, 17)), 8, 20)
    assert outer == ((0, 3),) and chosen.tolist() == [3, 4, 5, *range(9, 17)]
    outer, chosen = covering(((18, 20),), 8, 20)
    assert outer == ((2, 3),) and chosen.tolist() == [2, 3]
    assert elements(((0, 1), (2, 3)), 8, 20) == ((0, 8), (16, 20)) and covering((), 8, 20)[0] == ()


def test_numbers_that_values_are_multiplied_by() -> None:
    assert scalar_problem("a", torch.tensor(2.0)) == ""
    assert "NaN" in scalar_problem("a", torch.tensor(float("nan"))) and "zero" in scalar_problem("a", torch.zeros(1))
    assert scalar_problem("a", torch.ones(2)) == "a has shape (2,), and is not one number"
