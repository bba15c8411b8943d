"""Runs of programs are the same if the program, its inputs and all memory are."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from paraxis.runtime.program_runs import ProgramRun, execute, observer, observing


def program(*args: Any) -> list[Any]:
    return [sum(args)]


SHARDS, TOKEN = [torch.ones(2)], torch.zeros(1)


def test_a_run_is_again_with_the_same_objects() -> None:
    run = ProgramRun(program, SHARDS, [TOKEN, 5])
    assert run.is_again(program, SHARDS, [TOKEN, 5])
    assert TOKEN.add_(1) == 1 and run.is_again(program, SHARDS, [TOKEN, 5]), "values do not matter"


@pytest.mark.parametrize(
    ("other", "shards", "inputs"),
    [
        (lambda *args: None, SHARDS, [TOKEN, 5]),
        (program, [torch.ones(2)], [TOKEN, 5]),
        (program, SHARDS, [TOKEN, 6]),
        (program, SHARDS, [TOKEN]),
        (program, SHARDS, [TOKEN.view(1), 5]),
        (program, SHARDS, [5, TOKEN]),
    ],
    ids=["program", "moved shard", "number", "fewer", "other object", "order"],
)
def test_a_run_with_anything_else_is_another(other: Any, shards: Any, inputs: Any) -> None:
    assert not ProgramRun(program, SHARDS, [TOKEN, 5]).is_again(other, shards, inputs)


def test_an_input_that_got_other_memory_is_another() -> None:
    token = torch.zeros(1)
    run = ProgramRun(program, SHARDS, [token])
    old = token.data
    token.data = torch.ones(1)
    assert not run.is_again(program, SHARDS, [token]) and old is not token


def test_a_run_keeps_nothing_alive() -> None:
    def own(*args: Any) -> None:
        return None

    token = torch.zeros(1)
    run = ProgramRun(own, [], [token])
    assert run.is_again(own, [], [token])
    del own, token
    gc.collect()
    assert run._program() is None and run._inputs[0]() is None


def test_the_innermost_observer_runs_programs() -> None:
    assert observer() is None
    with observing(lambda *args: 1), observing(execute):
        innermost = observer()
        assert innermost is not None and torch.equal(innermost(program, SHARDS, [TOKEN])[0], SHARDS[0] + TOKEN)
    assert observer() is None
