"""What this rank is in, for the error of a rank that waits for it.

A rank that waits in vain should say what the others are in: "rank 0: generate; rank 1: save_pretrained". A rank that is
busy cannot be asked, so each writes it into the store of the process group when it enters a public call that all ranks
must make (:func:`collective_call`), and again when it leaves it. That takes some 30 microseconds: nothing for such a
call, too much for a forward, which is not written down.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from ..compat.distributed import default_store
from ..utils.user_line import user_line

P = ParamSpec("P")
R = TypeVar("R")

_names: list[str] = []  # the public calls that this rank is in, the outermost first


def current_activity() -> str:
    """The outermost public call that this rank is in; empty outside of them, and in a forward."""
    return _names[0] if _names else ""


@contextmanager
def activity(name: str) -> Iterator[None]:
    """Inside, this rank is in ``name``: a public call that all ranks must make."""
    _names.append(name)
    if len(_names) == 1:
        _publish(name)
    try:
        yield
    finally:
        _names.pop()
        if not _names:
            _publish("", last=name)


def collective_call(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a public function that all ranks must call: other ranks can read that this one is in it."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with activity(name):
                return function(*args, **kwargs)

        return run

    return decorate


def _publish(name: str, last: str = "") -> None:
    if not dist.is_available() or not dist.is_initialized():
        return
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    try:
        default_store().set(f"paraxis/activity/{dist.get_rank()}", json.dumps([name, last, user_line()]))
    except RuntimeError:  # the process that hosts the store has ended: whatever comes next says so
        return


def activity_of(rank: int) -> tuple[str, str]:
    """The public call that a (global) rank is in, and a text for errors. The call is empty outside of all of them."""
    name, last, line = "", "", ""
    if rank == dist.get_rank():
        name, line = current_activity(), user_line()
    else:
        try:
            store, key = default_store(), f"paraxis/activity/{rank}"
            if store.check([key]):
                name, last, line = json.loads(store.get(key))
        except RuntimeError:
            return "", "unknown"
    where = f" at {line}" if line else ""
    if name:
        return name, name + where
    after = f", after {last}" if last else ""
    return "", f"a forward, or code of its own{after}{where}"


def activities(ranks: list[int]) -> str:
    """``rank 0: generate at main.py:10; rank 1: ...``, for an error."""
    return "; ".join(f"rank {rank}: {activity_of(rank)[1]}" for rank in ranks)
