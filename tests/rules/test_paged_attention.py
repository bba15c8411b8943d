"""Paged attention: heads are sharded, and each rank says which KV heads it has."""

from __future__ import annotations

import pytest
from rules.families import validate


@pytest.mark.filterwarnings("ignore")
def test_every_strategy_for_the_samples_is_right() -> None:
    validate("paged_attention")
