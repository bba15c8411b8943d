"""Names of repeated blocks."""

from __future__ import annotations

import pytest

from paraxis.utils.names import block_of, numbered_pattern, pattern_of


@pytest.mark.parametrize(
    ("name", "pattern", "block"),
    [
        ("model.layers.11.mlp.up_proj", "model.layers.*.mlp.up_proj", "model.layers.11"),
        ("layers.0.experts.3.weight", "layers.*.experts.*.weight", "layers.0"),
        ("lm_head.weight", "lm_head.weight", ""),
        ("model.norm2", "model.norm2", ""),
        ("", "", ""),
    ],
)
def test_numbers_in_names_are_repetitions(name: str, pattern: str, block: str) -> None:
    assert pattern_of(name) == pattern and block_of(name) == block


def test_names_of_one_pattern_are_told_apart_by_their_numbers() -> None:
    """Only by those that differ: every layer has the same experts."""
    some = [f"layers.{layer}.experts.{expert}.up" for layer in (0, 1, 2, 5) for expert in (0, 1)]
    others = [f"layers.{layer}.experts.{expert}.up" for layer in (3, 4) for expert in (0, 1)]
    assert numbered_pattern(some, some + others) == "layers.[0-2,5].experts.*.up"
    assert numbered_pattern(others, some + others) == "layers.[3-4].experts.*.up"
