"""The metadata of a parameter."""

from __future__ import annotations

import copy

import pytest

from paraxis import HashableSlice, ParameterMeta, ParameterSlice


def test_metadata_is_compared_by_identity_and_survives_copies() -> None:
    """Compiled code is guarded on which parameter it sees."""
    meta = ParameterMeta(name="w", shape=(2, 3))
    assert meta != ParameterMeta(name="w", shape=(2, 3)) and copy.deepcopy(meta) is meta
    assert len({meta, meta}) == 1


def test_slices_are_dictionary_keys() -> None:
    mapping = {HashableSlice(0, 4): ParameterSlice("w", slice(4, 8))}
    assert mapping[HashableSlice(0, 4)].index == slice(4, 8)
    assert HashableSlice(0, 4, 2).to_slice() == slice(0, 4, 2)


def test_the_former_name_of_dp_shard_warns() -> None:
    with pytest.warns(DeprecationWarning, match="dp_shard"):
        assert ParameterMeta().split is None
