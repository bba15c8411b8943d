"""A step of a batch, as all ranks get it: the tokens that are computed, and the blocks of their sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .scheduler import Part


class Sequence(NamedTuple):
    """The tokens of one sequence in a step: where they are among those of the step, and where its cache is.

    Attributes:
        start: The first of its tokens.
        tokens: How many there are.
        past: How many positions are in the cache already.
        blocks: Its blocks.
    """

    start: int
    tokens: int
    past: int
    blocks: np.ndarray


@dataclass
class Step:
    """What a step computes.

    Attributes:
        ids: The tokens of all sequences.
        positions: Their positions.
        rows: Those whose logits are wanted.
        sequences: Which tokens are of one sequence.
    """

    ids: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    sequences: list[Sequence]

    @staticmethod
    def of(parts: list[Part]) -> Step:
        """The step of these requests. A row for each that gets a token, in their order."""
        ids: list[int] = []
        positions, rows, sequences = [], [], []
        for request, count in parts:
            start = len(ids)
            ids += request.next_tokens(count)
            positions.append(np.arange(request.computed, request.computed + count))
            sequences.append(Sequence(start, count, request.computed, np.array(request.blocks, dtype=np.int64)))
            if count == request.pending:
                rows.append(len(ids) - 1)
        return Step(np.array(ids), np.concatenate(positions), np.array(rows, dtype=np.int64), sequences)

    def slots(self, size: int) -> torch.Tensor:
        """Where in the cache the keys and values of its tokens go."""
        found = []
        for each in self.sequences:
            at = np.arange(each.past, each.past + each.tokens)
            found.append(each.blocks[at // size] * size + at % size)
        return torch.from_numpy(np.concatenate(found))
