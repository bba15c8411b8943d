"""FlexAttention: heads are sharded, and functions that look at the head see its global index."""

from __future__ import annotations

import pytest
from rules.families import validate


@pytest.mark.filterwarnings("ignore")
def test_every_strategy_for_the_samples_is_right() -> None:
    validate("flex_attention")
