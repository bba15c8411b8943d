"""A small model, planned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from passes.small import planned

from paraxis.plan.offline import Planned


@pytest.fixture
def offline() -> Iterator[Planned]:
    """The small model, planned over two simulated ranks, with its captured graph and its solution."""
    with planned() as found:
        yield found
