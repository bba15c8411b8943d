"""Extras of Triton, where there is one."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")


def test_every_name_exists() -> None:
    from paraxis.compat import triton as compat

    assert all(callable(getattr(compat, name)) for name in compat.__all__)
