"""The mark of tests that take long."""

from __future__ import annotations

import pytest

long = pytest.mark.long
"""For tests that `make test` has no time for; `make test-long` runs them."""
