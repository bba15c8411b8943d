"""Layouts against brute force: what each rank holds, index by index."""

from __future__ import annotations

import json
import random

import pytest
from placement.brute_force import RANDOM, expanded, held, owners, random_layout

from paraxis.errors import DivisibilityError
from paraxis.placement import Layout, Shard, ensure_divisibility

# -- construction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "world", "unit"), [(8, 2, 1), (8, 4, 2), (14, 4, 1), (28, 4, 2), (50257, 8, 1)])
def test_even_is_contiguous_and_balanced(size: int, world: int, unit: int) -> None:
    layout = Layout.even(size, world, unit)
    parts = [held(layout, size, r) for r in range(world)]
    assert [i for p in parts for i in p] == list(range(size))
    sizes = [len(p) for p in parts]
    assert all(n % unit == 0 for n in sizes)
    assert max(sizes) - min(sizes) <= unit and sizes == sorted(sizes, reverse=True)
    assert layout.contiguous(size) and not layout.has_copies
    assert layout.is_even == (size % (world * unit) == 0)


def test_even_with_fewer_units_than_ranks_makes_copies() -> None:
    layout = Layout.even(4 * 16, 8, unit=16)  # four KV heads on eight ranks
    for rank in range(8):
        assert held(layout, 64, rank) == list(range(rank // 2 * 16, rank // 2 * 16 + 16))
        assert layout.replica(rank) == (rank % 2, 2)
    assert layout.has_copies and layout.is_even and not layout.contiguous(64)


def test_one_unit_on_all_ranks_is_full() -> None:
    assert Layout.even(16, 4, unit=16).is_full
    assert Layout.even(16, 4, unit=16) == Layout.full(4)


def test_even_refuses_broken_units() -> None:
    with pytest.raises(ValueError, match="units of 3"):
        Layout.even(8, 2, unit=3)


def test_a_split_on_one_rank_is_not_full() -> None:
    assert not Layout.even(8, 1).is_full
    assert Shard.of(0, Layout.even(8, 1)).layouts


def test_concat_splits_every_segment_separately() -> None:
    sizes = (8, 4, 4)  # [q|k|v], unequal
    layout = Layout.concat([(n, Layout.even(n, 2)) for n in sizes])
    assert held(layout, 16, 0) == [0, 1, 2, 3, 8, 9, 12, 13]
    assert held(layout, 16, 1) == [4, 5, 6, 7, 10, 11, 14, 15]
    assert layout.is_even and not layout.contiguous(16)


def test_concat_of_equal_segments_has_the_segment_for_a_period() -> None:
    gate_up = Layout.concat([(6, Layout.even(6, 2))] * 2)
    assert gate_up == Layout.even(6, 2) and gate_up.period == 6


@pytest.mark.parametrize(("seed", "rng"), RANDOM[:20])
def test_concat_by_membership(seed: int, rng: random.Random) -> None:
    world = rng.choice([2, 3, 4])
    parts = [(n, random_layout(rng, n, world)) for n in rng.choices([2, 4, 6], k=3)]
    layout = Layout.concat(parts)
    expected = [o for n, x in parts for o in owners(x, n)]
    assert owners(layout, sum(n for n, _ in parts)) == expected


# -- the canonical form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "rng"), RANDOM)
def test_equal_layouts_have_equal_owners(seed: int, rng: random.Random) -> None:
    world, size, repeats = rng.choice([2, 4]), rng.choice([2, 3, 4, 6]), rng.choice([1, 2, 3])
    layout = random_layout(rng, size, world)
    total = size * repeats
    again = Layout.of(total, [[(i, i + 1) for i in held(layout, total, r)] for r in range(world)])
    assert again == layout and hash(again) == hash(layout)
    assert owners(again, total) == owners(layout, total)
    # and no shorter period would do
    for shorter in range(1, layout.period):
        if layout.period % shorter == 0:
            pattern = owners(layout, layout.period)
            assert pattern != pattern[:shorter] * (layout.period // shorter)


def test_the_period_does_not_depend_on_the_order_of_ranges() -> None:
    assert Layout.of(8, [[(4, 6), (0, 2)], [(2, 4), (6, 8)]]) == Layout.even(4, 2)
    assert Layout.of(4, [[(0, 1), (1, 2)], [(2, 4), (3, 3)]]) == Layout.even(4, 2)


def test_a_rank_may_hold_nothing_or_everything() -> None:
    first = Layout.of(6, [[(0, 6)], []])
    assert first.period == 1 and first.local_size(6, 0) == 6 and first.local_size(6, 1) == 0
    assert first.expand(6, 1) == () and not first.is_full and not first.has_copies


# -- queries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "rng"), RANDOM)
def test_queries_by_membership(seed: int, rng: random.Random) -> None:
    world, period, repeats = rng.choice([2, 4]), rng.choice([2, 4, 6]), rng.choice([1, 2, 3])
    layout = random_layout(rng, period, world)
    size = period * repeats
    parts = [held(layout, size, r) for r in range(world)]
    for rank in range(world):
        assert expanded(layout, size, rank) == parts[rank]
        assert layout.local_size(size, rank) == len(parts[rank])
        twins = [r for r in range(world) if parts[r] == parts[rank]]
        assert layout.replica(rank) == (twins.index(rank), len(twins))
    assert layout.has_copies == any(len(o) > 1 for o in owners(layout, size))
    assert layout.is_even == (len({len(p) for p in parts}) == 1)
    assert layout.is_full == all(len(p) == size for p in parts)
    flat = [i for p in parts for i in p]
    assert layout.contiguous(size) == (flat == list(range(size)) and all(parts))
    assert layout.fits(size) and not layout.fits(0)
    assert layout.fits(size + 1) == ((size + 1) % layout.period == 0)


# -- views ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "rng"), RANDOM[:40])
def test_scale_and_unscale(seed: int, rng: random.Random) -> None:
    world, size, inner = rng.choice([2, 4]), rng.choice([2, 4, 6]), rng.choice([2, 3, 4])
    layout = random_layout(rng, size, world)
    scaled = layout.scale(inner)
    assert owners(scaled, size * inner) == [o for o in owners(layout, size) for _ in range(inner)]
    if layout.period > 1:
        assert scaled.unscale(inner) == layout
    # unscale of anything: an outer layout if and only if blocks of `inner` stay together in the period
    other = random_layout(rng, 12, world)
    outer = other.unscale(inner)
    pattern = owners(other, other.period)
    blocks = [pattern[i : i + inner] for i in range(0, other.period, inner)]
    together = other.period % inner == 0 and all(len(set(block)) == 1 for block in blocks)
    assert (outer is not None) == (together or (outer is not None and other.period == 1))
    if outer is not None and other.period > 1:
        assert owners(outer, len(blocks)) == [block[0] for block in blocks]


def test_unscale_of_a_constant_layout() -> None:
    """What one rank holds all of stays together in blocks of any size."""
    first = Layout.of(6, [[(0, 6)], []])
    assert first.scale(3) == first
    assert first.unscale(3) == first


@pytest.mark.parametrize(("seed", "rng"), RANDOM[:40])
def test_slice_of_a_layout_has_the_same_owners(seed: int, rng: random.Random) -> None:
    world, size = rng.choice([2, 4]), rng.choice([4, 6, 8])
    layout = random_layout(rng, size, world)
    start = rng.randrange(size)
    stop = rng.randrange(start + 1, size + 1)
    part = layout.slice(size, start, stop)
    assert owners(part, stop - start) == owners(layout, size)[start:stop]
    for rank in range(world):
        mine = held(layout, size, rank)
        a, b = layout.local_slice(size, start, stop, rank)
        assert mine[a:b] == [i for i in mine if start <= i < stop]


# -- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "rng"), RANDOM[:20])
def test_json_gives_the_same_layout(seed: int, rng: random.Random) -> None:
    layout = random_layout(rng, rng.choice([4, 6]), 2)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_text_says_how_sizes_are_distributed() -> None:
    assert str(Layout.even(8, 2)) == "even" and str(Layout.even(5, 2)) == "uneven"
    assert str(Layout.even(2, 4)) == "0:1,0:1,1:2,1:2 of 2"


def test_divisibility_error_names_what_and_where() -> None:
    ensure_divisibility(8, 4)
    with pytest.raises(ValueError, match=r"6 is not divisible by 4.*heads of `model\.attn`.*divides 6"):
        ensure_divisibility(6, 4, module="model.attn", dim="heads")
    with pytest.raises(ValueError):
        ensure_divisibility(6, 0)


def test_divisibility_error_is_caught_as_that_of_the_ancestor() -> None:
    """optimum.fx.parallelization raises a RuntimeError, and other sizes that do not fit a ValueError."""
    for kind in (RuntimeError, ValueError, DivisibilityError):
        with pytest.raises(kind):
            ensure_divisibility(7, 2)
