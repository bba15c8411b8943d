"""Steps that succeed on all ranks or fail on all of them.

A rank that fails alone leaves the others waiting in the next collective until it times out. So the ranks tell
one another how a step went, through the key-value store that the process group was set up with: it needs no
device, works with every backend, and can tell *which* rank does not answer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..errors import CheckpointError, CollectiveError
from .liveness import is_alive, machine

DEFAULT_TIMEOUT = 1800.0
"""Seconds a rank waits for the others, where the caller does not say."""

PATIENCE = 2.0
"""Seconds between looks at whether the ranks that are waited for are still alive."""

_FAILED_TIMEOUT = 60.0  # a rank that has failed itself waits no longer than this before it says so
_rounds: dict[str, int] = {}  # how many exchanges each group has had; the same on all its ranks
_by_itself = False


class _Unanswered(Exception):
    """Some ranks did not answer in time, or never will."""

    def __init__(self, ranks: list[int], ended: bool = False) -> None:
        self.ranks, self.ended = ranks, ended


def _alone(group: dist.ProcessGroup | None) -> bool:
    """Whether there is nobody to talk to: no process group, one rank, a fake group of many, or :func:`rank0_only`."""
    if _by_itself or not dist.is_available() or not dist.is_initialized():
        return True
    return dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"


@contextmanager
def rank0_only() -> Iterator[None]:
    """Inside, this rank works for all of them and asks nobody; the others wait in ``all_gather_object``."""
    global _by_itself
    before, _by_itself = _by_itself, True
    try:
        yield
    finally:
        _by_itself = before


def is_rank0_only() -> bool:
    """Whether this rank is at work for the others, who would not meet it in a collective."""
    return _by_itself


class _Round:
    """One exchange over the store."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.name = group.group_name
        self.number = _rounds[self.name] = _rounds.get(self.name, 0) + 1
        self.global_ranks = dist.get_process_group_ranks(group)
        self.store = dist.distributed_c10d._get_default_store()
        self.store.set(f"paraxis/process/{dist.get_rank()}", json.dumps([machine(), os.getpid()]))

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"paraxis/{self.name}/{number or self.number}/{rank}"

    def all_gather_object(self, value: Any, timeout: float) -> list[Any]:
        """Everybody's value (plain data), in the order of the ranks."""
        self.store.set(self._key(self.rank), json.dumps(value))
        keys = [self._key(rank) for rank in range(self.world)]
        self._wait(keys, time.monotonic() + timeout)
        values = [json.loads(self.store.get(key)) for key in keys]
        if self.number > 1:  # whoever is in this round has read all of the last one
            self.store.delete_key(self._key(self.rank, self.number - 1))
        return values

    def _wait(self, keys: list[str], deadline: float) -> None:
        """Until all keys are there; or until one never will be, since its rank has ended.

        The store could wait by itself, but would tell of every look that found nothing.
        """
        started = looked = time.monotonic()
        while True:
            try:
                if self.store.check(keys):
                    return
            except RuntimeError:  # what a store says whose host has gone
                raise _Unanswered([]) from None
            now = time.monotonic()
            ended = [rank for rank in self._silent() if self._has_ended(rank)] if now - looked > PATIENCE else []
            looked = now if now - looked > PATIENCE else looked
            if ended or now >= deadline:
                raise _Unanswered(ended or self._silent(), bool(ended))
            # Asking costs the store's host little; a long pause would cost every step part of its time.
            time.sleep(min(max((now - started) / 20, 0.001), 0.1, deadline - now))

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank has ended, as far as can be told: it must be on this machine and have said who it is."""
        try:
            key = f"paraxis/process/{rank}"
            where, process = json.loads(self.store.get(key)) if self.store.check([key]) else ("", 0)
        except RuntimeError:
            return False
        return bool(where) and where == machine() and not is_alive(process)

    def _silent(self) -> list[int]:
        try:
            silent = [rank for rank in range(self.world) if not self.store.check([self._key(rank)])]
            return [self.global_ranks[rank] for rank in silent]
        except RuntimeError:
            return []

    def linger(self) -> None:
        """Wait until all ranks have read this round: the store may live in a process that is about to end."""
        counter = f"paraxis/{self.name}/{self.number}/read"
        deadline = time.monotonic() + 10.0
        try:
            count = self.store.add(counter, 1)
            while count < self.world and time.monotonic() < deadline:
                time.sleep(0.01)
                count = self.store.add(counter, 0)
        except RuntimeError:
            return


def all_gather_object(
    group: dist.ProcessGroup | None, value: Any, what: str, timeout: float | None = None
) -> list[Any]:
    """Everybody's ``value`` (plain data), in the order of the ranks of ``group``. A collective."""
    if _alone(group):
        return [value]
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    try:
        return _Round(group).all_gather_object(value, timeout)
    except _Unanswered as silent:
        raise _no_answer(silent, what, timeout) from None


def agree(
    group: dist.ProcessGroup | None,
    error: str | BaseException | None,
    what: str,
    timeout: float | None = None,
) -> None:
    """Tell the other ranks how this rank's step went, and raise on all of them if it failed on any.

    Args:
        group: The ranks that take part; ``None`` is all of them.
        error: ``None`` if the step succeeded here, otherwise what went wrong.
        what: The step, as in "loading the weights".
        timeout: Seconds to wait for the other ranks.

    Raises:
        The error itself, on a rank that failed. On the others a :class:`CheckpointError` with the same
        message if it was one (a checkpoint is the same for everybody), else a ``RuntimeError`` that names the
        rank. TimeoutError: If a rank does not answer; CollectiveError: if it has ended. The message names it.
    """
    own = RuntimeError(f"{what}: {error}") if isinstance(error, str) else error
    if _alone(group):
        if own is not None:
            raise own
        return
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    step = _Round(group)
    report = None if own is None else (isinstance(own, CheckpointError), _text(own, error))
    try:
        reports = step.all_gather_object(report, timeout if own is None else min(timeout, _FAILED_TIMEOUT))
    except _Unanswered as silent:
        raise (_no_answer(silent, what, timeout) if own is None else own) from None
    failed = [(rank, r) for rank, r in enumerate(reports) if r is not None]
    if not failed:
        return
    step.linger()
    if own is not None:
        raise own
    rank, (about_checkpoint, message) = failed[0]
    if about_checkpoint:
        raise CheckpointError(message)
    raise RuntimeError(f"{what}: rank {step.global_ranks[rank]} failed: {message}")


@contextmanager
def on_all_ranks(group: dist.ProcessGroup | None, what: str, timeout: float | None = None) -> Iterator[None]:
    """Run the body on every rank of ``group``; if it raises on one, raise on all. See :func:`agree`."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    agree(group, failure, what, timeout)


def _text(own: BaseException, error: str | BaseException | None) -> str:
    if isinstance(error, str):
        return error
    return str(own) if isinstance(own, CheckpointError) else f"{type(own).__name__}: {own}"


def _no_answer(silent: _Unanswered, what: str, timeout: float) -> Exception:
    who = f"rank {', '.join(map(str, silent.ranks))}" if silent.ranks else "another rank"
    if silent.ended:
        return CollectiveError(f"{what}: {who} has ended. Its own output says why.")
    return TimeoutError(
        f"{what}: {who} did not answer within {timeout:g} s. It has ended, hangs, or runs another program: "
        "all ranks of a group must call Paraxis alike. Its own output says more."
    )
