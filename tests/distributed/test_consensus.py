"""A step that fails on one rank fails on all, immediately and with the reason."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from weights.tiny_models import fake_rank

from paraxis.distributed.consensus import (
    all_gather_object,
    is_rank0_only,
    on_all_ranks,
    raise_on_all_ranks,
    rank0_only,
)
from paraxis.errors import CheckpointError
from ranks import spawn_ranks


def caught(fn: Any) -> tuple[str, str] | None:
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def fails(culprits: list[int], kind: str) -> Any:
    def body() -> None:
        with on_all_ranks(None, "reading"):
            if dist.get_rank() in culprits:
                raise {"checkpoint": CheckpointError, "key": KeyError}[kind](f"from rank {dist.get_rank()}")

    return caught(body)


def reports(error_on: int) -> Any:
    return caught(lambda: raise_on_all_ranks(None, "disk full" if dist.get_rank() == error_on else None, "saving"))


def within_subgroups() -> tuple[list[Any], Any]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    values = [all_gather_object(mine, [dist.get_rank(), n], "exchanging") for n in range(3)]

    def body() -> None:
        with on_all_ranks(mine, "reading"):
            if dist.get_rank() == 2:
                raise OSError("no")

    return values, caught(body)


def silent_rank() -> Any:
    if dist.get_rank() == 1:
        time.sleep(3)
        return None
    start = time.monotonic()
    return caught(lambda: raise_on_all_ranks(None, None, "loading", timeout=1.0)), time.monotonic() - start


def host_of_the_store_fails() -> None:
    with on_all_ranks(None, "reading"):
        if dist.get_rank() == 0:
            raise CheckpointError("the reason")
        time.sleep(0.5)


def test_success_on_all_ranks_raises_nothing(ranks) -> None:  # type: ignore[no-untyped-def]
    assert ranks(2).run(fails, [], "key") == [None, None]
    assert ranks(2).run(reports, 5) == [None, None]


def test_checkpoint_errors_are_the_same_everywhere(ranks) -> None:  # type: ignore[no-untyped-def]
    assert ranks(2).run(fails, [1], "checkpoint") == [("CheckpointError", "from rank 1")] * 2


def test_other_errors_name_the_rank(ranks) -> None:  # type: ignore[no-untyped-def]
    first, second = ranks(2).run(fails, [1], "key")
    assert second == ("KeyError", "'from rank 1'")
    assert first == ("RuntimeError", "reading: rank 1 failed: KeyError: 'from rank 1'")


def test_each_failing_rank_has_its_own_error(ranks) -> None:  # type: ignore[no-untyped-def]
    results = ranks(2).run(fails, [0, 1], "checkpoint")
    assert [message for _, message in results] == ["from rank 0", "from rank 1"]


def test_messages_name_the_step_and_the_rank(ranks) -> None:  # type: ignore[no-untyped-def]
    first, second = ranks(2).run(reports, 0)
    assert first == ("RuntimeError", "saving: disk full")
    assert second == ("RuntimeError", "saving: rank 0 failed: disk full")


def test_groups_do_not_disturb_one_another(ranks) -> None:  # type: ignore[no-untyped-def]
    results = ranks(4).run(within_subgroups)
    assert results[0][0] == [[[0, n], [1, n]] for n in range(3)] and results[0][1] is None
    assert results[3][0] == [[[2, n], [3, n]] for n in range(3)]
    assert results[3][1] == ("RuntimeError", "reading: rank 2 failed: OSError: no")


def test_a_rank_that_does_not_answer_is_named() -> None:
    (kind, message), seconds = spawn_ranks(2, silent_rank)[0].value
    assert kind == "TimeoutError" and message.startswith("loading: rank 1 did not answer within 1 s")
    assert 1 <= seconds < 2.5


def test_the_reason_arrives_although_the_failing_rank_ends() -> None:
    outcomes = spawn_ranks(2, host_of_the_store_fails)
    assert [(o.error, o.message) for o in outcomes] == [("CheckpointError", "the reason")] * 2


def test_a_single_rank_exchanges_nothing() -> None:
    raise_on_all_ranks(None, None, "nothing")
    assert all_gather_object(None, 3, "nothing") == [3]
    with pytest.raises(RuntimeError, match="saving: disk full"):
        raise_on_all_ranks(None, "disk full", "saving")
    with pytest.raises(KeyError), on_all_ranks(None, "reading"):
        raise KeyError("x")
    with fake_rank(1, 4) as group:
        assert all_gather_object(group, 3, "nothing") == [3]


def work_of_rank0() -> tuple[bool, list[int]]:
    if dist.get_rank() == 0:
        with rank0_only():
            assert is_rank0_only() and all_gather_object(None, 1, "alone") == [1]
    return is_rank0_only(), all_gather_object(None, dist.get_rank(), "together")


def test_rank_0_may_work_for_the_others(ranks: Any) -> None:
    assert ranks(2).run(work_of_rank0) == [(False, [0, 1])] * 2
