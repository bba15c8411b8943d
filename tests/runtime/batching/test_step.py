"""What a step tells the ranks of its tokens."""

from __future__ import annotations

import pickle

import numpy as np

from paraxis.runtime.batching.request import Request
from paraxis.runtime.batching.scheduler import Part
from paraxis.runtime.batching.step import Step


def test_tokens_positions_rows_and_slots_of_mixed_requests() -> None:
    prefill, decode = Request("a", [5, 6, 7, 8], 4), Request("b", [1, 2], 4, tokens=[3], computed=2)
    prefill.blocks, decode.blocks = [4], [0, 2]
    step = Step.of([Part(decode, 1), Part(prefill, 2)])
    assert step.ids.tolist() == [3, 5, 6] and step.positions.tolist() == [2, 0, 1]
    assert step.rows.tolist() == [0], "the prefill goes on, and gets no token yet"
    assert [(each.start, each.tokens, each.past) for each in step.sequences] == [(0, 1, 2), (1, 2, 0)]
    assert step.slots(2).tolist() == [2 * 2 + 0, 8, 9]
    same = pickle.loads(pickle.dumps(step))
    assert np.array_equal(same.ids, step.ids) and same.sequences[0].blocks.tolist() == [0, 2]
