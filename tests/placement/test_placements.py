"""Placements of tensors: boxes, local shapes and indices, JSON."""

from __future__ import annotations

import json
import random
from itertools import product

import pytest
from placement.brute_force import RANDOM, held, random_layout

from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Shard, from_json, local_index, local_shape, to_json


def test_shard_of_sorts_and_leaves_out_full_layouts() -> None:
    even = Layout.even(4, 2)
    assert Shard.of({2: even, 0: even}).layouts == ((0, even), (2, even))
    assert Shard.of({1: Layout.full(2)}) == SHARED == Shard.of(0, None)
    assert Shard.of({0: even, 1: Layout.full(2)}) == Shard.of(0, even)
    assert Shard.of(0, even) != Shard.of(1, even)
    assert SHARED != REPLICATE and hash(Shard.of(0, even)) == hash(Shard.of({0: Layout.even(4, 2)}))


def test_copies_of_a_box() -> None:
    """A box split two ways has no copies even if each of its dimensions has."""
    rows = Layout.of(4, [[(0, 2)], [(0, 2)], [(2, 4)], [(2, 4)]])
    columns = Layout.of(4, [[(0, 2)], [(2, 4)], [(0, 2)], [(2, 4)]])
    assert Shard.of(0, rows).has_copies and Shard.of(1, columns).has_copies
    assert not Shard.of({0: rows, 1: columns}).has_copies
    assert SHARED.has_copies


def test_shapes_and_indices_of_boxes() -> None:
    rows, packed = Layout.even(4, 2), Layout.concat([(8, Layout.even(8, 2)), (4, Layout.even(4, 2))])
    box = Shard.of({0: rows, 2: packed})
    shape = (4, 3, 12)
    for rank in range(2):
        index = local_index(box, shape, rank)
        members = [[i for a, b in dim for i in range(a, b)] for dim in index]
        assert members == [held(rows, 4, rank), [0, 1, 2], held(packed, 12, rank)]
        assert local_shape(box, shape, rank) == (2, 3, 6) == tuple(len(m) for m in members)
    for placement in (REPLICATE, PARTIAL, SHARED):
        assert local_shape(placement, shape, 1) == shape
        assert local_index(placement, shape, 1) == [((0, n),) for n in shape]


def test_dimensions_that_are_not_sharded_may_be_symbolic() -> None:
    symbol = object()
    assert local_shape(Shard.of(1, Layout.even(8, 2)), (symbol, 8), 0) == (symbol, 4)
    assert Layout.even(8, 2).fits(symbol)


@pytest.mark.parametrize("world", [2, 4])
def test_boxes_cover_every_element_once_without_copies(world: int) -> None:
    shape = (4, 8)
    for box in (Shard.of(0, Layout.even(4, world)), Shard.of(1, Layout.concat([(4, Layout.even(4, world))] * 2))):
        count = dict.fromkeys(product(range(4), range(8)), 0)
        for rank in range(world):
            spans = [[i for a, b in dim for i in range(a, b)] for dim in local_index(box, shape, rank)]
            for element in product(*spans):
                count[element] += 1
        assert set(count.values()) == {1}


# -- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "rng"), RANDOM[:20])
def test_json_gives_the_same_placement(seed: int, rng: random.Random) -> None:
    layout = random_layout(rng, rng.choice([4, 6]), 2)
    for placement in (REPLICATE, PARTIAL, SHARED, Shard.of({0: layout, 3: Layout.even(8, 2)})):
        assert from_json(json.loads(json.dumps(to_json(placement)))) == placement
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_text_is_short() -> None:
    assert str(REPLICATE) == "R" and str(PARTIAL) == "P" and str(SHARED) == "S()"
    assert str(Shard.of(1, Layout.even(8, 2))) == "S(1)"
    assert str(Shard.of(0, Layout.even(5, 2))) == "S(0: uneven)"
    assert str(Shard.of(0, Layout.even(2, 4))) == "S(0: 0:1,0:1,1:2,1:2 of 2)"
