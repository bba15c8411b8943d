"""Block-granular dimensions: the blocks that a rank holds, and where its indices are among them."""

from __future__ import annotations

import pytest

from paraxis.placement import REPLICATE, Layout, Shard, length_of
from paraxis.placement.blocks import Axis, is_granular, stored_placement

LAYOUTS = {
    "even": Layout.even(40, 4),
    "uneven": Layout.even(40, 3),
    "packed": Layout.concat([(16, Layout.even(16, 4)), (24, Layout.even(24, 4))]),
    "copies": Layout.even(40, 4, 20),
    "one rank has all": Layout.of(40, [[(0, 40)], [], []]),
    "repeating": Layout.of(4, [[(0, 1)], [(1, 4)]]),
}
AXES = {
    "aligned": Axis.blocks(0, 40, 8),
    "last block is short": Axis.blocks(0, 40, 16),
    "elements": Axis.blocks(0, 40, 1),
    "one block": Axis.blocks(0, 40, 64),
    "two weights": Axis.pieces(0, 16, [(0, 20), (0, 20)]),
    "a part of a weight": Axis.pieces(0, 16, [(24, 30), (0, 10)]),
    "same blocks twice": Axis.pieces(0, 20, [(0, 20), (0, 20)]),
}


def blocks_by_index(axis: Axis, size: int) -> list[int]:
    """The block of every index, one by one."""
    return [
        segment.first + (i - segment.start + segment.phase) // axis.block
        for segment in axis.segments_of(size)
        for i in range(segment.start, segment.stop)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", AXES)
def test_a_rank_holds_the_blocks_of_its_indices(axis: str, layout: str) -> None:
    a, x = AXES[axis], LAYOUTS[layout]
    found, of = a.layout(x, 40), blocks_by_index(a, 40)
    for rank in range(x.world):
        mine = [i for start, stop in x.expand(40, rank) for i in range(start, stop)]
        held = [b for start, stop in found.expand(a.size, rank) for b in range(start, stop)]
        assert held == sorted({of[i] for i in mine})
        runs = a.runs(x.expand(40, rank), 40)
        local = [run.first + (i + run.phase) // a.block for run in runs for i in range(run.length)]
        assert [held[block] for block in local] == [of[i] for i in mine]
        assert a.is_regular(runs) == (local == [i // a.block for i in range(len(mine))])


def test_blocks_of_pieces() -> None:
    """Two weights of 20 rows in blocks of 16: four blocks, of which the second of each has four rows."""
    assert AXES["two weights"].size == 4
    assert AXES["same blocks twice"] == Axis(2, 0, 20)
    assert AXES["a part of a weight"].size == 4  # rows 24 to 54 are in three blocks


def test_placements_of_stored_tensors() -> None:
    axes = (Axis.blocks(0, 12, 1), Axis.blocks(1, 40, 16), Axis(7))
    rows, columns = Shard.of(0, Layout.even(12, 2)), Shard.of(1, Layout.even(40, 2))
    assert stored_placement(axes, REPLICATE, (12, 40)) == REPLICATE
    assert stored_placement(axes, rows, (12, 40)) == rows
    held = stored_placement(axes, columns, (12, 40))
    assert isinstance(held, Shard) and [length_of(r) for r in held.dims[1].ranges] == [2, 2]
    assert held.has_copies  # block 1 has indices 16 to 32, and 20 is where the ranks meet
    all_in_one = (Axis.blocks(0, 12, 1), Axis.blocks(1, 40, 64))
    assert stored_placement(all_in_one, columns, (12, 40)) == REPLICATE


def test_units_are_not_cut() -> None:
    assert is_granular(Layout.even(10, 2, 2), 10, 2) and not is_granular(Layout.even(10, 2), 10, 2)
    assert is_granular(Layout.of(9, [[(0, 4)], [(4, 9)]]), 9, 2)  # the end may be anywhere
