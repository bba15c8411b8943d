"""Operators along the last dimensions of images and signals."""

from __future__ import annotations

import pytest
from rules.families import validate


@pytest.mark.filterwarnings("ignore")
def test_samples() -> None:
    validate("image")
