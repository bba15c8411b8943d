"""What the host sees of decode steps: tokens and stop flags, one step late, so that neither waits for the other."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch


class Seen(NamedTuple):
    """What a step has written for the host.

    Attributes:
        tokens: Its tokens, on the host.
        stopped: Whether all sequences have ended.
        invalid: Whether probabilities were not finite.
    """

    tokens: torch.Tensor
    stopped: bool
    invalid: bool


class LateLook:
    """Copies signals to the host without waiting, and reads them when the device has come that far."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch = batch
        self._pinned = device.type == "cuda"
        self._free = [
            (
                torch.zeros(batch + 2, dtype=torch.int64, pin_memory=self._pinned),
                torch.cuda.Event() if self._pinned else None,
            )
            for _ in range(2)
        ]
        self._sent: deque[tuple[torch.Tensor, Any]] = deque()

    @property
    def waiting(self) -> int:
        """The steps that were not looked at yet."""
        return len(self._sent)

    def send(self, signals: torch.Tensor) -> None:
        """Start copying the signals of a step."""
        slot, event = self._free.pop()
        slot.copy_(signals, non_blocking=True)
        if event is not None:
            event.record()
        self._sent.append((slot, event))

    def receive(self) -> Seen:
        """What the oldest step that was not looked at has written; waits until the device has done it."""
        slot, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        tokens = slot[: self.batch].clone()
        unfinished, invalid = slot[self.batch :].tolist()
        self._free.append((slot, event))
        return Seen(tokens, not unfinished, bool(invalid))

    def forget(self) -> None:
        """Leave out the steps that were not looked at."""
        self._free += self._sent
        self._sent.clear()
