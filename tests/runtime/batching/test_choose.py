"""Choosing tokens: the most likely one, a draw that a seed repeats, and log-probabilities."""

from __future__ import annotations

from typing import Any

import torch

from paraxis.runtime.batching.choose import choose
from paraxis.runtime.batching.request import ERROR, Choice, Request


def requests_of(*choices: Choice) -> list[Request]:
    """A request for each way to choose."""
    return [Request(str(i), [1, 2], 4, choice=choice) for i, choice in enumerate(choices)]


def test_greedy_and_drawn_tokens_of_one_step() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 10)
    seeded = Choice(sample=True, generator=torch.Generator().manual_seed(4))
    found = choose(requests_of(Choice(), seeded, Choice(logprobs=2)), logits, None)
    assert found[0] == (int(logits[0].argmax()), None)
    torch.manual_seed(4)
    assert found[1][0] == int(torch.multinomial(logits[1].softmax(-1), 1)), "as in generate after manual_seed"
    token, logprobs = found[2]
    right = logits[2].log_softmax(-1)
    assert logprobs is not None and token == int(right.argmax()) and len(logprobs.top) == 2
    assert abs(logprobs.chosen - float(right.max())) < 1e-6 and logprobs.top[0][0] == token


def test_processors_see_the_tokens_so_far() -> None:
    def forbid(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ids[0]] = -torch.inf
        return scores

    logits = torch.zeros(1, 4)
    logits[0, 1], logits[0, 3] = 2, 1
    (request,) = requests_of(Choice(processors=forbid, logprobs=0, processed=True))
    ((token, logprobs),) = choose([request], logits, None)
    assert token == 3 and logits[0, 1] == 2, "the logits of others are left alone"
    assert logprobs is not None and logprobs.chosen > -1


def test_a_failing_processor_ends_its_request_alone() -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("no such token")

    bad, good = requests_of(Choice(processors=fails), Choice())
    found = choose([bad, good], torch.eye(2, 5), None)
    assert bad.ended == ERROR and bad.error == "ValueError: no such token"
    assert not good.ended and found[1][0] == 1
