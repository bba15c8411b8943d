"""Lookups: embedding tables, index, gather, scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules.families import assert_offers, validate

from paraxis.rules.validation import check
from paraxis.rules.validation.draw import f, i

aten = torch.ops.aten

REPLICATED = {"aten.index.Tensor (4, 6, 8)"}  # with a mask


def test_every_strategy_for_the_samples_is_right() -> None:
    validate("lookup", REPLICATED)


@pytest.mark.parametrize(
    ("op", "args", "inputs", "outputs"),
    [
        (aten.index.Tensor, (f(4, 6, 8), [None, i(6, 3)]), ("S(2)", "R"), ("S(2)",)),
        (aten.gather.default, (f(4, 6), 1, i(6, 4, 2)), ("S(0)", "S(0)"), ("S(0)",)),
        (aten.embedding.default, (f(12, 8), i(12, 4)), ("S(1)", "R"), ("S(1)",)),
    ],
)
def test_rule_offers_these_placements(op: Any, args: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    assert_offers(op, args, inputs, outputs)


@pytest.mark.parametrize(("padding", "by_frequency"), [(-1, False), (3, False), (-1, True)])
def test_vocabulary_parallel_embedding(padding: int, by_frequency: bool) -> None:
    """Each rank looks up the ids of its rows; not where gradients depend on how often all ids occur."""
    args = f(13, 6), i(13, 4, 5), padding, by_frequency
    found = check(aten.embedding.default, *args, worlds=(2, 4), gradients=(2,))
    assert not found.wrong, found.wrong[:5]
    assert any(kind == "vocab" for _, _, kind in found.checked) != by_frequency
