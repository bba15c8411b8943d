"""Tokens are chosen as transformers chooses them: the same draws, the same padding of sequences that have ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paraxis.runtime.generation.choose_tokens import choose_tokens, draw
from paraxis.runtime.generation.decode_state import DecodeState
from paraxis.runtime.generation.request import Request

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def chosen(state: DecodeState | None = None, scores: Any = None, **options: Any) -> tuple[list[int], DecodeState]:
    """The tokens chosen by these scores, and the state after it."""
    state = state or DecodeState(2, 16, torch.device("cpu"), 0, False)
    request = Request(IDS, None, None, {}, **options)
    if not state.column.item():
        state.start(IDS)
    logits = torch.tensor(scores or [[0.0, 1.0, 0.5, 0.2], [0.3, 0.1, 0.9, 0.2]])
    padded = torch.cat([logits, torch.zeros(2, 4)])[:, None].expand(-1, 3, -1)  # more rows, more positions
    width = int(state.column.item()) + 1
    choose_tokens(request, state, padded, state.sequences[:, : width - 1], width)
    return state.signals[:2].tolist(), state


@pytest.mark.parametrize("rows", [1, 5])
def test_draws_are_those_of_multinomial(rows: int) -> None:
    probabilities = torch.rand(rows, 50).softmax(-1)
    torch.manual_seed(5)
    expected = [torch.multinomial(probabilities, 1).squeeze(1) for _ in range(20)]
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.stack([draw(probabilities) for _ in range(20)]), torch.stack(expected))
    assert torch.equal(torch.rand(1), after)


def test_greedy_tokens_are_appended() -> None:
    tokens, state = chosen()
    assert tokens == [1, 2]
    assert state.sequences[:, :4].tolist() == [[1, 2, 3, 1], [4, 5, 6, 2]] and state.column.item() == 4
    assert state.token[:2, 0].tolist() == [1, 2]
    assert state.signals.tolist() == [1, 2, 1, 0]


def test_a_sequence_that_has_ended_is_padded() -> None:
    options = {"stop_tokens": torch.tensor([2, 9]), "pad_token": torch.tensor(7)}
    tokens, state = chosen(**options)
    assert tokens == [1, 2] and state.unfinished.tolist() == [1, 0] and state.signals[2] == 1
    tokens, state = chosen(state, **options)
    assert tokens == [1, 7] and state.signals[2] == 1
    tokens, state = chosen(state, [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]], **options)
    assert tokens == [2, 7] and state.signals[2] == 0, "all have ended"


def test_stop_strings_see_the_sequences_with_the_new_token() -> None:
    seen = []

    def ends_with_two(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        seen.append(ids.tolist())
        return ids[:, -1] == 2

    tokens, state = chosen(stop_strings=[ends_with_two])
    assert seen == [[[1, 2, 3, 1], [4, 5, 6, 2]]] and state.unfinished.tolist() == [1, 0]
    assert chosen(state, stop_strings=[ends_with_two])[0] == tokens, "without a stop token, nothing is padded"


def test_processors_run_in_order_on_the_tokens_so_far() -> None:
    def first(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.tolist() == IDS.tolist()
        return scores + torch.tensor([9.0, 0, 0, 0])

    assert chosen(processors=[first, lambda ids, scores: -scores])[0] == [3, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_noticed_in_a_draw(value: float) -> None:
    scores = [[0.0, value, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    _, state = chosen(scores=scores, sample=True)
    assert state.signals[3] == 1
    assert chosen(state, sample=True)[1].signals[3] == 1, "it stays so"
    masked = [[0.0, -float("inf"), 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert chosen(scores=masked, sample=True)[1].signals[3] == 0
