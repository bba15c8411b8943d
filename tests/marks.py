"""Marks of tests."""

from __future__ import annotations

import os

import pytest

long = pytest.mark.skipif(not os.environ.get("PARAXIS_LONG"), reason="takes long: set PARAXIS_LONG=1")
"""For tests that `make test` has no time for; `make test PARAXIS_LONG=1` runs them too."""
