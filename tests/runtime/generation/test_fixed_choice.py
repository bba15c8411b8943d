"""Choosing tokens on fixed memory gives the tokens of :func:`choose_tokens`, for all requests of one form."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paraxis.runtime.generation.choose_tokens import choose_tokens
from paraxis.runtime.generation.decode_state import DecodeState
from paraxis.runtime.generation.fixed_choice import FixedChoice, form_of
from paraxis.runtime.generation.request import Request

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def request_of(*processors: Any, ids: torch.Tensor = IDS, stop: list[int] | None = None, **options: Any) -> Request:
    if stop is not None:
        options |= {"stop_tokens": torch.tensor(stop), "pad_token": torch.tensor(0)}
    return Request(ids, None, None, {}, processors=list(processors), **options)


def chosen(request: Request, fixed: FixedChoice | None, state: DecodeState, steps: int = 12) -> list[Any]:
    """Sequences and stop flags after some steps, and the scores of each."""
    generator = torch.Generator().manual_seed(1)
    state.start(request.input_ids)
    torch.manual_seed(2)
    scores = []
    for i in range(steps):
        logits = torch.randn(2, 1, 12, generator=generator) * 3
        length = request.input_ids.shape[1] + i
        if fixed is None:
            scores.append(choose_tokens(request, state, logits, state.sequences[:, :length], length + 1)[1])
        else:
            scores.append(fixed(state, logits)[1])
    return [state.sequences[:, : 3 + steps].tolist(), state.unfinished.tolist(), torch.stack(scores)]


def state() -> DecodeState:
    return DecodeState(2, 32, torch.device("cpu"), 0, False)


def eos(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens)


PAIRS: dict[str, tuple[Request, Request]] = {
    "greedy": (request_of(), request_of(ids=IDS + 1)),
    "sampled": (
        request_of(TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.8), sample=True),
        request_of(TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.8), sample=True, ids=IDS + 2),
    ),
    "stop tokens": (request_of(stop=[7, 9]), request_of(stop=[3, 11])),
    "repetition": (
        request_of(RepetitionPenaltyLogitsProcessor(3.0)),
        request_of(RepetitionPenaltyLogitsProcessor(3.0), ids=IDS + 3),
    ),
    "minimum length": (
        request_of(MinLengthLogitsProcessor(8, eos(2, 5)), stop=[2, 5]),
        request_of(MinLengthLogitsProcessor(11, eos(4, 9)), stop=[4, 9]),
    ),
    "minimum of new tokens": (
        request_of(MinNewTokensLengthLogitsProcessor(3, 4, eos(2)), stop=[2]),
        request_of(MinNewTokensLengthLogitsProcessor(3, 9, eos(7)), stop=[7]),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_requests_of_one_form_choose_as_without(name: str) -> None:
    first, second = PAIRS[name]
    assert form_of(first) == form_of(second) is not None
    on = state()
    fixed = FixedChoice(first, on)
    for request in (first, second, first):
        fixed.update(request)
        *expected, right = chosen(request, None, state())
        *found, scores = chosen(request, fixed, on)
        assert found == expected and torch.equal(scores, right)


def test_updates_leave_the_tensors_of_requests_alone() -> None:
    first, second = PAIRS["minimum length"]
    fixed = FixedChoice(first, state())
    fixed.update(second)
    assert first.stop_tokens is not None and first.stop_tokens.tolist() == [2, 5]
    assert first.processors[0].eos_token_id.tolist() == [2, 5]


def test_a_state_ends_with_its_last_reference() -> None:
    """Its KV cache is large: it must not wait for the garbage collector."""
    on = state()
    request, _ = PAIRS["minimum length"]
    on.captured.graphs.append(FixedChoice(request, on))
    alive = weakref.ref(on)
    gc.disable()
    try:
        del on
        assert alive() is None
    finally:
        gc.enable()


OTHERS = [
    request_of(sample=True),
    request_of(stop=[4]),
    request_of(stop=[4, 5]),
    request_of(TemperatureLogitsWarper(0.7)),
    request_of(TemperatureLogitsWarper(0.8)),
    request_of(MinLengthLogitsProcessor(0, eos(4))),
    request_of(MinLengthLogitsProcessor(1, eos(4))),
    request_of(RepetitionPenaltyLogitsProcessor(1.5)),
]


def test_forms_tell_apart_what_is_not_the_same_operators() -> None:
    forms = [form_of(each) for each in (request_of(), *OTHERS)]
    assert None not in forms and len(set(forms)) == len(forms)


@pytest.mark.parametrize(
    "request_",
    [
        request_of(NoRepeatNGramLogitsProcessor(2)),
        request_of(RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)),
        request_of(RepetitionPenaltyLogitsProcessor(1.5), ids=IDS[:, :0]),
        request_of(stop_strings=[lambda ids, scores: ids[:, -1] == 3]),
    ],
    ids=["n-grams", "without the prompt", "embeddings", "strings"],
)
def test_what_depends_on_the_length_has_no_form(request_: Request) -> None:
    assert form_of(request_) is None
