"""What a rank is in, as the others read it, and the line of the user."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from paraxis.distributed.activity import activities, activity, activity_of, collective_call, current_activity
from paraxis.utils.user_line import user_line


@collective_call("loading")
def load() -> tuple[str, str]:
    return current_activity(), user_line()


def in_calls() -> tuple[Any, ...]:
    rank = dist.get_rank()
    dist.barrier()
    with activity("generate" if rank == 0 else "save_pretrained"), activity("inner"):
        dist.barrier()
        inside = activities([0, 1])
        dist.barrier()
    dist.barrier()
    return inside, activity_of(1 - rank)


def test_others_see_the_outermost_call(ranks: Any) -> None:
    for rank, (inside, outside) in enumerate(ranks(2).run(in_calls)):
        assert "rank 0: generate at test_activity.py:" in inside
        assert "rank 1: save_pretrained at test_activity.py:" in inside
        name, text = outside
        assert name == "" and ("save_pretrained" if rank == 0 else "generate") in text


def test_without_ranks_nothing_is_written() -> None:
    name, line = load()
    assert name == "loading" and line.startswith("test_activity.py:")
    assert current_activity() == "" and load.__name__ == "load"


def test_the_line_is_the_users_own() -> None:
    here = inspect.currentframe()
    assert here is not None
    assert user_line() == f"test_activity.py:{here.f_lineno}"
    found: list[str] = []
    torch.utils._pytree.tree_map(lambda x: found.append(user_line()), [1])
    assert found[0].startswith("test_activity.py:")
