"""Names of repeated blocks."""

from __future__ import annotations

import pytest

from paraxis.utils.names import block_of, pattern_of


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
