"""What is known about capturing the steps of one state."""

from __future__ import annotations

from typing import Any

PATIENCE = 6
"""Steps that may differ from those before, until no more capture is tried."""


class CapturedSteps:
    """The captured steps of one state, and whether the next step is to be captured.

    Attributes:
        graphs: The captured steps, the last used first.
        last: The run of the last step that called the model.
        repeats: Whether it was the same as that of the step before.
        refused: Forms of requests whose choice of tokens cannot be captured.
        abandoned: Whether steps are not captured.
    """

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.last: Any = None
        self.repeats = self.abandoned = False
        self.refused: list[Any] = []
        self._patience = PATIENCE

    def note(self, observer: Any, sets_nothing: bool) -> None:
        """Note a step that has called the model, and what a :class:`.StepObserver` has seen of it."""
        self.repeats = observer.is_again(self.last) and sets_nothing
        self.last = observer.runs[0] if len(observer.runs) == 1 else None
        if not self.repeats:
            self._patience -= 1
        self.abandoned = self._patience <= 0

    def restart(self, observer: Any) -> None:
        """Note a step that has called the model, but not whether it sets attributes: the next one may repeat it."""
        self.repeats = False
        self.last = observer.runs[0] if len(observer.runs) == 1 else None

    def refuse(self, form: Any) -> None:
        """A capture has failed: with this choice of tokens, or without any."""
        if form is None:
            self.abandoned = True
        else:
            self.refused.append(form)
