"""Sample calls of operators that change shapes: every one is of an operator of its family."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paraxis.rules import Sample
from paraxis.rules.registry import registered
from paraxis.rules.validation.shapes import lines, lookups, reductions, splits, views


@pytest.mark.parametrize(
    ("samples", "family"),
    [(views, "view"), (splits, "split"), (reductions, "reduction"), (lines, "line"), (lookups, "lookup")],
)
def test_samples_belong_to_their_family(samples: Callable[[], list[Sample]], family: str) -> None:
    entries = registered()
    found = samples()
    assert len(found) > 15 and {entries[s.target].samples for s in found} == {family}
