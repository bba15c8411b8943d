"""The board: what ranks of one machine have posted."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch.distributed as dist

from paraxis.distributed.board import SLOTS, create_board


def posted() -> list[Any]:
    group: Any = dist.group.WORLD
    board = create_board(group, 10.0)
    assert board is not None
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    before = board.number_of(other, 1)
    dist.barrier()
    for count in range(1, SLOTS + 3):
        board.post(count, 100 * rank + count)
    dist.barrier()
    late = board.wait(SLOTS + 3, 0.3, lambda: None) if rank == 0 else []
    read = [board.number_of(other, n) for n in (1, 2, 3, SLOTS + 2, SLOTS + 3)]
    return [before, read, board.count_of(other), board.wait(SLOTS + 2, 5.0, lambda: None), late]


def test_what_others_have_posted(ranks: Any) -> None:
    for rank, (before, read, count, missing, late) in enumerate(ranks(2).run(posted)):
        base = 100 * (1 - rank)
        assert before is None, "nothing was posted"
        assert read == [None, None, base + 3, base + SLOTS + 2, None], "the last ones stay"
        assert count == SLOTS + 2 and missing == [] and late == ([0, 1] if rank == 0 else [])


def without_memory() -> bool:
    os.environ["PARAXIS_SHARED_MEMORY"] = "0"
    try:
        group: Any = dist.group.WORLD
        return create_board(group, 10.0) is None
    finally:
        del os.environ["PARAXIS_SHARED_MEMORY"]


def test_ranks_without_shared_memory_have_none(ranks: Any) -> None:
    assert ranks(2).run(without_memory) == [True, True]


def noticed() -> float:
    """Seconds until a watch that raises ends a wait."""
    group: Any = dist.group.WORLD
    board = create_board(group, 10.0)
    assert board is not None

    def watch() -> None:
        raise KeyError("in vain")

    started = time.monotonic()
    with pytest.raises(KeyError):
        board.wait(1, 20.0, watch)
    return time.monotonic() - started


def test_a_waiting_rank_looks_around(ranks: Any) -> None:
    assert max(ranks(2).run(noticed)) < 5
