"""Numbers of bytes as text."""

from __future__ import annotations

import pytest

from paraxis.utils.sizes import size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (25_600_000, "25.6 MB"), (16_060_000_000, "16.1 GB")],
)
def test_three_digits_and_a_unit(size: float, text: str) -> None:
    assert size_text(size) == text


def test_gigabytes_are_the_largest_unit() -> None:
    assert size_text(1.4e12) == "1.4e+03 GB"
