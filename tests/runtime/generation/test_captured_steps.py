"""When the next step is captured, and when none is any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paraxis.runtime.generation.captured_steps import PATIENCE, CapturedSteps


def step(run: Any, *more: Any) -> Any:
    """What an observer has seen of a step."""
    return SimpleNamespace(runs=[run, *more], is_again=lambda last: not more and last == run)


def test_a_step_that_repeats_is_captured_next() -> None:
    steps = CapturedSteps()
    steps.note(step(1), True)
    assert not steps.repeats
    steps.note(step(1), True)
    assert steps.repeats
    steps.note(step(2), True)
    assert not steps.repeats and steps.last == 2


def test_a_step_that_sets_attributes_is_not() -> None:
    steps = CapturedSteps()
    for _ in range(3):
        steps.note(step(1), False)
        assert not steps.repeats


def test_steps_of_several_programs_are_not() -> None:
    steps = CapturedSteps()
    for _ in range(3):
        steps.note(step(1, 2), True)
        assert not steps.repeats and steps.last is None


def test_a_step_that_was_not_watched_is_where_the_next_one_starts_from() -> None:
    steps = CapturedSteps()
    for _ in range(PATIENCE):
        steps.note(step(1), True)
    assert steps.repeats
    for _ in range(PATIENCE):
        steps.restart(step(1))
        assert not steps.repeats and not steps.abandoned
    steps.note(step(1), True)
    assert steps.repeats


def test_steps_that_never_repeat_are_abandoned() -> None:
    steps = CapturedSteps()
    for i in range(PATIENCE):
        assert not steps.abandoned
        steps.note(step(i), True)
    assert steps.abandoned


def test_a_choice_is_refused_before_steps_are_abandoned() -> None:
    steps = CapturedSteps()
    steps.refuse("form")
    assert steps.refused == ["form"] and not steps.abandoned
    steps.refuse(None)
    assert steps.abandoned
