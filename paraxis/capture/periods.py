"""Periods of a deep model: the blocks that one program can compute.

A stack of blocks is a head of blocks that are special, and then periods of blocks that repeat: one block of one kind,
or five with a sliding window and one without. A model is captured with its head and two periods; what the second does
with the first's results, all later ones do.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .repeated_blocks import kinds_of

MAX_PERIOD = 8
"""Blocks of a period, at most."""


@dataclass(frozen=True)
class Periods:
    """How the blocks of a model repeat.

    Attributes:
        path: The name of the list of blocks in the model.
        head: How many blocks come before the periods.
        period: How many blocks a period has.
        count: How many periods there are.
    """

    path: str
    head: int
    period: int
    count: int

    @property
    def captured(self) -> int:
        """How many blocks are captured: the head and two periods."""
        return self.head + 2 * self.period


def find_periods(model: nn.Module) -> Periods | None:
    """The periods of a model with one stack of blocks; None if that has too few, or no order in them."""
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) <= 2
    ]
    outermost = [(p, m) for p, m in lists if not any(p.startswith(f"{other}.") for other, _ in lists)]
    deepest = max(outermost, key=lambda item: len(item[1]), default=None)
    if deepest is None:
        return None
    path, blocks = deepest
    kinds = kinds_of(blocks, model)
    for period in range(1, MAX_PERIOD + 1):
        first = len(kinds) - period  # where the periods begin, at the earliest
        while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
            first -= 1
        # One period at least is in the head: the first one follows something else than a block.
        head = max(first, 0) + period
        head += (len(kinds) - head) % period
        count = (len(kinds) - head) // period
        if count >= 3:
            return Periods(path, head, period, count)
    return None
