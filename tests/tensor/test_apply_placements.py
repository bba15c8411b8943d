"""Placements are written once, by one function."""

from __future__ import annotations

from typing import Any

import pytest

from paraxis import ParameterMeta
from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Placement, Shard
from paraxis.tensor.apply_placements import apply_placements, stored

ROWS = Shard.of(0, Layout.even(4, 2))
COLUMNS = Shard.of(1, Layout.even(4, 2))


def test_sharded_and_replicated_parameters_are_placed() -> None:
    group: Any = object()
    sharded, replicated = ParameterMeta(), ParameterMeta()
    apply_placements([(sharded, COLUMNS), (replicated, REPLICATE)], group)
    assert (sharded.placement, sharded.dim, sharded.is_parallel, sharded.group) == (COLUMNS, 1, True, group)
    assert (replicated.placement, replicated.is_parallel, replicated.group) == (REPLICATE, False, group)


def test_placed_parameter_keeps_its_placement() -> None:
    meta = ParameterMeta()
    apply_placements([(meta, ROWS)], None)  # type: ignore[arg-type]
    apply_placements([(meta, COLUMNS)], None)  # type: ignore[arg-type]
    assert meta.placement == ROWS and meta.dim == 0


@pytest.mark.parametrize(
    ("used", "expected"), [(ROWS, ROWS), (REPLICATE, REPLICATE), (SHARED, REPLICATE), (PARTIAL, REPLICATE)]
)
def test_parameters_are_stored_replicated_unless_sharded(used: Placement, expected: Placement) -> None:
    assert stored(used) == expected
