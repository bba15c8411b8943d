"""Comparing the inputs of every call between tensor-parallel ranks.

Ranks of a tensor-parallel group each compute a part of one result, so all of them must call the model with the same
inputs. If one has other values of the same shape, every rank gets garbage and no collective fails. So each rank posts a
checksum of a call's arguments (:mod:`.checksum`) before it runs the call, and compares those of all ranks after it: the
collectives of the call make sure that all have posted. Nobody waits for it, and all ranks raise after the same call.

Each posted number depends on all calls before it, so that comparing the last one is enough.

- Ranks of one machine post in shared memory (:mod:`.board`); ranks of several in the store, which takes longer: there,
  decode steps are compared every ``STORE_INTERVAL`` calls, and all of them at the end of ``generate``.
- Inputs on a device are summed there, and the number is read one call later: then the device has come that far.
- A rank that waits in a collective, since another one runs a different program, looks at the numbers meanwhile.
"""

from __future__ import annotations

import inspect
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..compat.distributed import default_store
from ..errors import RankMismatchError
from ..utils.user_line import user_line
from .activity import activities
from .board import Board, create_board
from .checksum import MASK, ArgumentSums, sums_of
from .consensus import all_gather_object, where_ranks_are
from .liveness import watch_while_waiting

STORE_INTERVAL = 16
"""Decode steps between two comparisons through the store."""
HISTORY = 2 * STORE_INTERVAL
"""Calls whose arguments can be named in an error."""
PATIENCE = 10.0
"""Seconds of waiting after which values that differ are taken for the reason."""
GAP = 5.0
"""Seconds without a look after which another wait has begun."""
DETAILS_TIMEOUT = 10.0
"""Seconds that a rank waits for the others' details of a difference: it raises in any case."""

_created: dict[str, int] = {}  # how many comparisons a group has: each has keys of its own in the store


class InputCheck:
    """Compares what the ranks of a group call a model with. ``active`` is set inside of a call."""

    def __init__(self, group: dist.ProcessGroup, timeout: float, board: Board | None) -> None:
        self.group, self.timeout, self.board = group, timeout, board
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = self.ranks.index(dist.get_rank())
        self.active = False
        self._cuda = torch.cuda.is_available()
        self.steps = 0
        """Calls since ``generate`` began; 0 outside of it."""
        _created[group.group_name] = _created.get(group.group_name, 0) + 1
        self._key = f"paraxis/{group.group_name}/inputs/{_created[group.group_name]}"
        self._others = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        self._count = self._posted = self._number = 0
        self._waiting: deque[tuple[int, ArgumentSums]] = deque()  # calls whose sums a device computes
        self._history: deque[tuple[int, str, ArgumentSums, int]] = deque(maxlen=HISTORY)
        self._names: dict[Any, tuple[str, ...]] = {}
        self._error: RankMismatchError | None = None
        self._looked = self._noticed = 0.0
        watch_while_waiting(self, InputCheck.look)

    @staticmethod
    def create(group: dist.ProcessGroup, timeout: float) -> InputCheck | None:
        """The comparison for a group; None for a single rank, or a group without processes. A collective."""
        if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
            return None
        return InputCheck(group, timeout, create_board(group, timeout))

    # -- a call ------------------------------------------------------------------------------------------------

    def run(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, and compare its arguments between the ranks. ``call`` has the called module as ``module``."""
        if self._cuda and torch.cuda.is_current_stream_capturing():
            return call(*args, **kwargs)  # somebody captures a graph around the model: nothing here would be replayed
        self.active = True
        try:
            self.note(type(call.module).__name__, self._names_of(type(call.module)), args, kwargs)
            if self.steps:
                self.steps += 1
            result = call(*args, **kwargs)
        except RankMismatchError:
            raise
        except (RuntimeError, TimeoutError) as error:  # perhaps because the ranks were called with other inputs
            self._explain(error)
            raise
        finally:
            self.active = False
        if self.board is not None:
            self._compare()
        elif self._is_due(args, kwargs):
            self._exchange()
        return result

    @contextmanager
    def comparing_tokens(self) -> Iterator[None]:
        """Inside, calls are not compared by their arguments: a generation loop compares the tokens of its steps, which
        it looks at anyway (:meth:`compare_tokens`)."""
        self.active = True
        try:
            yield
        except RankMismatchError:
            raise
        except (RuntimeError, TimeoutError) as error:
            self._explain(error)
            raise
        finally:
            self.active = False

    def compare_tokens(self, tokens: torch.Tensor) -> None:
        """Compare the tokens of a decode step, which are on the host. A collective, every few steps at least."""
        self.note("a decode step", ("input_ids",), (tokens,), {})
        if self.steps:
            self.steps += 1
        if self.board is not None:
            self._compare()
        elif self._count % STORE_INTERVAL == 0:
            self._exchange()

    def note(self, what: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Post the checksums of some arguments."""
        self._count += 1
        self._error = None
        sums = sums_of(names, args, kwargs)
        self._history.append((self._count, what, sums, self.steps))
        if not sums.late and not self._waiting:
            self._post(self._count, sums)
            return
        self._waiting.append((self._count, sums))
        self._settle(self._count - 1)

    def _post(self, count: int, sums: ArgumentSums) -> None:
        self._number = (self._number * 1000003 + sums.total + 1) & MASK
        self._posted = count
        if self.board is not None:
            self.board.post(count, self._number, sums.form)

    def _settle(self, until: int) -> None:
        """Post the calls that waited for a device, up to one that it has reached."""
        while self._waiting and self._waiting[0][0] <= until:
            count, sums = self._waiting.popleft()
            sums.settle()
            self._post(count, sums)

    def _names_of(self, cls: Any) -> tuple[str, ...]:
        """The names of the positional parameters of a module's forward."""
        found = self._names.get(cls)
        if found is None:
            try:
                parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
            except (TypeError, ValueError):
                parameters = []
            found = self._names[cls] = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        return found

    # -- comparing ---------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Raise if another rank has posted another number for a call that this one has posted too."""
        board, posted, number = self.board, self._posted, self._number
        assert board is not None
        for rank in self._others:
            theirs = board.number_of(rank, posted)
            if theirs is None:  # not there yet, in a call without collectives: compare the last one of both
                common = min(posted, board.count_of(rank))
                mine = board.number_of(self.rank, common) if common else None
                theirs = board.number_of(rank, common) if common else None
                if mine is None or theirs is None or mine == theirs:
                    continue
                self._raise()
            elif theirs != number:
                self._raise()

    def look(self) -> None:
        """While this rank waits for others in a call: raise if they were called with inputs of another form, with which
        they run another program. With other values the ranks come to the end of the call, unless they wait for long."""
        if not self.active:  # it is another model that waits: this one's last error was raised already
            return
        if self._error is not None:
            raise self._error
        if self.board is None:
            return
        if self._differ(form=True):
            self._raise()
        now = time.monotonic()
        if not self._differ() or now - self._looked > GAP:
            self._noticed = now
        self._looked = now
        if now - self._noticed > PATIENCE:
            self._raise()

    def _differ(self, form: bool = False) -> bool:
        """Whether any two ranks have posted different numbers, or forms, for the last call."""
        assert self.board is not None
        found = {self.board.number_of(rank, self._posted, form) for rank in range(len(self.ranks))}
        return len(found - {None}) > 1

    def _explain(self, error: Exception) -> None:
        """After an error of a call: raise the reason, if it is that the ranks have other inputs."""
        if self._error is not None:
            raise self._error from error
        if self.board is not None and self._differ():
            try:
                self._raise()
            except RankMismatchError as reason:
                raise reason from error

    def _is_due(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether to compare after this call through the store: not in every decode step."""
        if torch.is_grad_enabled() or self._count % STORE_INTERVAL == 0:
            return True
        return not any(_is_step(value) for value in (*args, *kwargs.values()))

    def _exchange(self) -> None:
        """Compare through the store. A collective."""
        what = "comparing the inputs"
        answers = all_gather_object(self.group, [self._posted, self._number], what, self.timeout)
        if any(theirs != answers[0] for theirs in answers):
            self._raise()

    def flush(self) -> None:
        """Compare all calls so far. A collective: every rank waits until all have made as many calls."""
        self._settle(self._count)
        if self.board is None:
            self._exchange()
            return
        missing = self.board.wait(self._posted, self.timeout, self.look)
        if self._differ():
            self._raise()
        self._compare()
        if missing:
            ranks = [self.ranks[rank] for rank in missing]
            names = ", ".join(map(str, ranks))
            raise TimeoutError(
                f"comparing the inputs: rank {names} made fewer calls within {self.timeout:g} s, or has ended. "
                f"{where_ranks_are(ranks)}"
            )

    # -- what differs ------------------------------------------------------------------------------------------

    def _raise(self) -> None:
        """Raise on this rank, with what differs; the others notice by themselves."""
        records = {str(n): _record(what, sums, steps) for n, what, sums, steps in self._history if n <= self._posted}
        self._number = 0  # from here on, the ranks may agree again
        self._history.clear()
        if self.board is not None:
            self.board.post(self._posted, 0)  # for ranks that have not noticed yet, it still differs from theirs
        answers = self._share_details(self._posted, {"calls": records, "line": user_line()})
        self._error = RankMismatchError(_message(answers, self.ranks))
        raise self._error

    def _share_details(self, count: int, mine: dict[str, Any]) -> dict[int, Any]:
        """What each rank was called with, by rank; of those that answer in time."""
        found: dict[int, Any] = {self.rank: mine}
        prefix = f"{self._key}/{count}"
        deadline = time.monotonic() + min(DETAILS_TIMEOUT, self.timeout)
        try:
            store = default_store()
            store.set(f"{prefix}/{self.rank}", json.dumps(mine))
            while len(found) < len(self.ranks) and time.monotonic() < deadline:
                for rank in self._others:
                    if rank not in found and store.check([f"{prefix}/{rank}"]):
                        found[rank] = json.loads(store.get(f"{prefix}/{rank}"))
                time.sleep(0.01)
            store.add(f"{prefix}/read", 1)  # this process may host the store, and is about to end
            while len(found) == len(self.ranks) and time.monotonic() < deadline:
                if store.add(f"{prefix}/read", 0) >= len(self.ranks):
                    break
                time.sleep(0.01)
        except RuntimeError:  # the process that hosts the store has ended
            pass
        return found


def _is_step(value: Any) -> bool:
    """Whether an argument looks like the tokens of a decode step."""
    return isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[1] == 1 and not value.is_floating_point()


def _record(what: str, sums: ArgumentSums, steps: int) -> dict[str, Any]:
    """A call as plain data: what was called, how many calls into ``generate``, and its arguments."""
    values = {n: list(v) if isinstance(v, torch.Size) else v for n, v in sums.values.items()}
    return {"what": what, "steps": steps, "arguments": {n: [sums.sums[n], values.get(n)] for n in sums.sums}}


_RULE = "tensor-parallel ranks compute one result together and must be called with the same inputs"


def _message(answers: dict[int, Any], ranks: list[int]) -> str:
    """What differs in the first call that differs, on which ranks, and what to do."""
    calls = set.intersection(*(set(theirs["calls"]) for theirs in answers.values()))
    for count in sorted(calls, key=int):
        found = {ranks[rank]: theirs["calls"][count] for rank, theirs in sorted(answers.items())}
        records = list(found.values())
        if all(record == records[0] for record in records):
            continue
        names = list(dict.fromkeys(name for record in records for name in record["arguments"]))
        texts = [text for name in names if (text := _difference(name, found))]
        if len({record["what"] for record in records}) > 1:
            texts = [f"rank {rank} is in {record['what']}" for rank, record in found.items()]
        lines = "; ".join(f"rank {ranks[r]}: {a['line']}" for r, a in sorted(answers.items()) if a["line"])
        where = f" ({lines})" if lines else ""
        return f"{_RULE}: {'; '.join(texts)}{where}. {_advice(names, found)}"
    return f"{_RULE}, but they were not: {activities(ranks)}. Pass the same values on all ranks."


def _difference(name: str, found: dict[int, Any]) -> str:
    """How an argument differs: the ranks that agree with one another, the largest set of them first."""
    alike: dict[str, list[int]] = {}
    texts = {}
    for rank, record in found.items():
        number, value = record["arguments"].get(name, [None, None])
        key = json.dumps([number, value])
        alike.setdefault(key, []).append(rank)
        shape = f"shape {tuple(value)}" if isinstance(value, list) else value or "other contents"
        texts[key] = "it is absent" if number is None else shape
    if len(alike) == 1:
        return ""
    most = sorted(alike.items(), key=lambda item: (-len(item[1]), item[1]))
    if len(set(texts.values())) == 1:
        others = " and ".join(_ranks(ranks) for _, ranks in most[1:])
        return f"the values of {name} on {others} differ from those on {_ranks(most[0][1])}"
    return f"{name} differs: " + ", ".join(f"{texts[key]} on {_ranks(ranks)}" for key, ranks in most)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _advice(names: list[str], found: dict[int, Any]) -> str:
    """What to do about it."""
    differing = [name for name in names if _difference(name, found)]
    sampled = any(record["steps"] > 1 for record in found.values())
    ended = len({record["what"] for record in found.values()}) > 1
    if sampled and (ended or any("ids" in name or name == "output" for name in differing)):
        return (
            "The ranks sampled different tokens. generate gives all ranks the random state of rank 0, so something "
            "else draws: give a torch.Generator the same seed on every rank, and let logits processors and stopping "
            "criteria depend on the tokens alone."
        )
    return (
        "Pass the same values on all ranks: the same seed, the same order of a data loader (no DistributedSampler "
        "within the group), the same sampled tokens. Config(check_ranks=False) switches the comparison off."
    )


def compare_arguments(
    group: dist.ProcessGroup,
    what: str,
    values: Mapping[str, Any],
    timeout: float,
    extra: Callable[[], Any] | None = None,
) -> list[Any]:
    """Compare some arguments between ranks, through the store; what ``extra`` returned on each rank. A collective.

    Raises:
        RankMismatchError: on all ranks, if the arguments differ.
    """
    sums = sums_of((), (), values)
    sums.settle()
    mine = {"calls": {"1": _record(what, sums, 0)}, "line": user_line()}
    answers = all_gather_object(group, [mine, extra() if extra is not None else None], what, timeout)
    if any(theirs["calls"] != mine["calls"] for theirs, _ in answers):
        found = {rank: theirs for rank, (theirs, _) in enumerate(answers)}
        raise RankMismatchError(_message(found, dist.get_process_group_ranks(group)))
    return [more for _, more in answers]
