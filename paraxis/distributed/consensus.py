"""Steps that succeed on all ranks or fail on all of them.

A rank that fails alone leaves the others waiting in the next collective until it times out. So the ranks exchange
the outcome of a step through the key-value store of the process group: it needs no device, works with every backend,
and shows *which* rank does not answer.

How long a rank waits: ``sync_timeout`` (:func:`limit_waits`). A step may take longer on one rank than on the others
(rank 0 writes a file, downloads, plans): a rank that is known to be in the same public call (:mod:`.activity`) is at
work, and gets ``DEFAULT_TIMEOUT``. Ranks that meet in different public calls raise at once.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from .. import errors
from ..compat.distributed import default_store
from ..errors import CheckpointError, CollectiveError
from ..utils.user_line import user_line
from .activity import activities, activity_of, current_activity
from .liveness import is_alive, look_around, machine_id

DEFAULT_TIMEOUT = 1800.0
"""Seconds a rank waits for others that are at work in the same call."""

LIVENESS_INTERVAL = 2.0
"""Seconds between checks whether the missing ranks are still alive."""

_QUOTE = re.compile("['\"]")
_FAILED_TIMEOUT = 60.0  # a rank that has failed waits no longer than this for the others before it raises
_rounds: dict[str, int] = {}  # the number of exchanges of each group; the same on all its ranks
_limits: dict[str, float] = {}  # sync_timeout by the name of the group
_rank0_only = False


def limit_waits(group: dist.ProcessGroup, seconds: float) -> None:
    """From now on, the ranks of a group wait no longer than this for one that is not in the same call."""
    _limits[group.group_name] = seconds


def wait_limit(group: dist.ProcessGroup) -> float | None:
    """The limit of :func:`limit_waits`, or None."""
    return _limits.get(group.group_name)


class _NoAnswer(Exception):
    """Some ranks did not answer in time, or have ended."""

    def __init__(self, ranks: list[int], ended: bool = False) -> None:
        self.ranks, self.ended = ranks, ended


def _is_single(group: dist.ProcessGroup | None) -> bool:
    """Whether there are no other ranks: no process group, one rank, a fake group, or inside :func:`rank0_only`."""
    if _rank0_only or not dist.is_available() or not dist.is_initialized():
        return True
    return dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"


@contextmanager
def rank0_only() -> Iterator[None]:
    """Inside, this rank does the work for all and exchanges nothing; the others wait in ``all_gather_object``."""
    global _rank0_only
    before, _rank0_only = _rank0_only, True
    try:
        yield
    finally:
        _rank0_only = before


def is_rank0_only() -> bool:
    """Whether this rank works for the others, which take part in no collective meanwhile."""
    return _rank0_only


class _OtherCalls(Exception):
    """The ranks met in different calls: what each of them is in."""


class _Round:
    """One exchange over the store."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.name = group.group_name
        self.number = _rounds[self.name] = _rounds.get(self.name, 0) + 1
        self.global_ranks = dist.get_process_group_ranks(group)
        self.store = default_store()
        self.store.set(f"paraxis/process/{dist.get_rank()}", json.dumps([machine_id(), os.getpid()]))

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"paraxis/{self.name}/{number or self.number}/{rank}"

    def all_gather_object(self, value: Any, what: str, timeout: float, at_work: float = 0.0) -> list[Any]:
        """The values (plain data) of all ranks, in order. Ranks that are at work in the same call get ``at_work``
        seconds, if that is more than ``timeout``."""
        step = _QUOTE.split(what)[0].strip()  # without names of files, which may differ between ranks
        mine = current_activity()
        self.store.set(self._key(self.rank), json.dumps([mine, step, user_line(), value]))
        keys = [self._key(rank) for rank in range(self.world)]
        started = time.monotonic()
        self._wait(keys, started + timeout, started + max(timeout, at_work))
        answers = [json.loads(self.store.get(key)) for key in keys]
        if self.number > 1:  # a rank in this round has read all of the previous one
            self.store.delete_key(self._key(self.rank, self.number - 1))
        if any(theirs[:2] != [mine, step] for theirs in answers):
            self.wait_until_read()
            raise _OtherCalls("; ".join(self._described(rank, *theirs[:3]) for rank, theirs in enumerate(answers)))
        return [theirs[3] for theirs in answers]

    def _described(self, rank: int, activity: str, step: str, line: str) -> str:
        within = f"{activity} ({step})" if activity else step
        return f"rank {self.global_ranks[rank]}: {within}{f' at {line}' if line else ''}"

    def _is_at_work(self) -> bool:
        """Whether all missing ranks are in the same public call as this one."""
        mine = current_activity()
        return bool(mine) and all(activity_of(rank)[0] == mine for rank in self._missing())

    def _wait(self, keys: list[str], deadline: float, at_work: float) -> None:
        """Wait until all keys are set, or until a rank that has not set its key has ended.

        The store's own ``wait`` would log every poll that found nothing.
        """
        started = checked = time.monotonic()
        while True:
            try:
                if self.store.check(keys):
                    return
            except RuntimeError:  # the process that hosts the store has ended
                raise _NoAnswer([]) from None
            now = time.monotonic()
            ended = []
            if now - checked > LIVENESS_INTERVAL:
                look_around()
                ended = [rank for rank in self._missing() if self._has_ended(rank)]
                checked = now
            if not ended and deadline <= now < at_work:
                deadline = at_work if self._is_at_work() else now
            if ended or now >= deadline:
                raise _NoAnswer(ended or self._missing(), bool(ended))
            # Polling costs the store's host little; long pauses would delay every step.
            time.sleep(min(max((now - started) / 20, 0.001), 0.1, deadline - now))

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank is known to have ended: only of ranks on this machine that have published their process id."""
        try:
            key = f"paraxis/process/{rank}"
            where, process = json.loads(self.store.get(key)) if self.store.check([key]) else ("", 0)
        except RuntimeError:
            return False
        return bool(where) and where == machine_id() and not is_alive(process)

    def _missing(self) -> list[int]:
        """Global ranks that have not set their key."""
        try:
            missing = [rank for rank in range(self.world) if not self.store.check([self._key(rank)])]
            return [self.global_ranks[rank] for rank in missing]
        except RuntimeError:
            return []

    def wait_until_read(self) -> None:
        """Wait until all ranks have read this round: this process may host the store, and is about to raise."""
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
    """The ``value`` (plain data) of every rank of ``group``, in order. A collective; ``what`` names it in errors."""
    if _is_single(group):
        return [value]
    timeout, at_work = _timeouts(group, timeout)
    try:
        return _Round(group).all_gather_object(value, what, timeout, at_work)
    except _NoAnswer as missing:
        raise _no_answer_error(missing, what, timeout) from None
    except _OtherCalls as calls:
        raise _other_calls_error(calls) from None


def _timeouts(group: dist.ProcessGroup | None, timeout: float | None) -> tuple[float, float]:
    """How long to wait for ranks, and for those that are at work in the same call."""
    if timeout is not None:
        return timeout, 0.0
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    return _limits.get(group.group_name, DEFAULT_TIMEOUT), DEFAULT_TIMEOUT


def raise_on_all_ranks(
    group: dist.ProcessGroup | None,
    error: str | BaseException | None,
    what: str,
    timeout: float | None = None,
) -> None:
    """Exchange the outcome of a step with the other ranks, and raise on all of them if it failed on any.

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
    if _is_single(group):
        if own is not None:
            raise own
        return
    timeout, at_work = _timeouts(group, timeout)
    step = _Round(group)
    report = None if own is None else (isinstance(own, CheckpointError), _text(own, error))
    if own is not None:
        timeout, at_work = min(timeout, _FAILED_TIMEOUT), 0.0
    try:
        reports = step.all_gather_object(report, what, timeout, at_work)
    except _NoAnswer as missing:
        raise (_no_answer_error(missing, what, timeout) if own is None else own) from None
    except _OtherCalls as calls:
        raise (_other_calls_error(calls) if own is None else own) from None
    failed = [(rank, r) for rank, r in enumerate(reports) if r is not None]
    if not failed:
        return
    step.wait_until_read()
    if own is not None:
        raise own
    rank, (about_checkpoint, message) = failed[0]
    if about_checkpoint:
        raise CheckpointError(message)
    raise RuntimeError(f"{what}: rank {step.global_ranks[rank]} failed: {message}")


@contextmanager
def on_all_ranks(group: dist.ProcessGroup | None, what: str, timeout: float | None = None) -> Iterator[None]:
    """Run the body on every rank of ``group``; if it raises on one, raise on all. See :func:`raise_on_all_ranks`."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_on_all_ranks(group, failure, what, timeout)


def _text(own: BaseException, error: str | BaseException | None) -> str:
    if isinstance(error, str):
        return error
    return str(own) if isinstance(own, CheckpointError) else f"{type(own).__name__}: {own}"


def _no_answer_error(missing: _NoAnswer, what: str, timeout: float) -> Exception:
    who = f"rank {', '.join(map(str, missing.ranks))}" if missing.ranks else "another rank"
    if missing.ended:
        return CollectiveError(f"{what}: {who} has ended. Its own output says why.")
    return TimeoutError(f"{what}: {who} did not answer within {timeout:g} s. {where_ranks_are(missing.ranks)}")


def where_ranks_are(missing: list[int]) -> str:
    """What this rank and those it waited for are in, and what to do, for an error."""
    return (
        f"{activities(sorted({dist.get_rank(), *missing}))}. All ranks of a group must make the same calls to Paraxis. "
        "A rank that is missing hangs, or runs another program: its own output says more. If it is only slow, raise "
        "Config.sync_timeout."
    )


def _other_calls_error(calls: _OtherCalls) -> Exception:
    return CollectiveError(
        f"the ranks make different calls: {calls}. All ranks of a group must make the same calls to Paraxis, in the "
        "same order."
    )


def on_rank0(group: dist.ProcessGroup | None, function: Callable[[], Any], what: str, timeout: float) -> Any:
    """What ``function`` returns on rank 0 (plain data), on every rank; the others wait. A collective.

    If it raises there, all ranks raise the same error: of the same class where that is a built-in one or one of
    Paraxis, else a ``RuntimeError``.
    """
    alone = _is_single(group)
    answer, failure = None, None
    if alone or dist.get_rank(group) == 0:
        try:
            answer = [True, function()]
        except Exception as error:
            failure, answer = error, [False, type(error).__name__, str(error)]
    if not alone:
        answer = all_gather_object(group, answer, what, timeout)[0]
    if failure is not None:
        raise failure
    assert answer is not None
    if not answer[0]:
        _, name, message = answer
        raise _error_class(name)(message)
    return answer[1]


def _error_class(name: str) -> type[Exception]:
    """The class of an error that another rank has raised."""
    found = getattr(errors, name, getattr(builtins, name, None))
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError
