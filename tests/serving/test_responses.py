"""Answers in the form of OpenAI's API."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

from serving.counting import word_tokenizer

from paraxis.runtime.batching.request import LogProbs, Request
from paraxis.serving.protocol import read_chat, read_completion
from paraxis.serving.responses import Responses, usage
from paraxis.serving.service import Answer
from paraxis.serving.text import TextStream

CHAT = {"messages": [{"role": "user", "content": "w1"}], "logprobs": True, "top_logprobs": 1}


def answer_of(tokens: list[int], ended: str = "length") -> Answer:
    """An answer with these tokens."""
    tokenizer = word_tokenizer()
    request = Request("a", [1, 2], 9, tokens=tokens, ended=ended)
    request.logprobs = [LogProbs(-0.5, ((token, -0.5),)) for token in tokens]
    found = Answer(0, request, TextStream(tokenizer), SimpleNamespace())  # type: ignore[arg-type]
    found.text.add(tokens)
    found.read = len(tokens)
    return found


def test_full_answers_and_their_usage() -> None:
    answers = [answer_of([5, 6]), answer_of([7])]
    ask = read_completion({"prompt": "w1 w2", "n": 2, "logprobs": 1})
    body = Responses(ask, "x", "model", word_tokenizer()).full(answers, ["w5 w6", "w7"])
    assert body["id"] == "cmpl-x" and [choice["text"] for choice in body["choices"]] == ["w5 w6", "w7"]
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"w5": -0.5}, {"w6": -0.5}]
    assert usage(answers, ask) == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_log_probabilities_are_numbers_of_json() -> None:
    answer = answer_of([5, 6])
    answer.request.logprobs = [LogProbs(-math.inf, ((5, math.nan),)), LogProbs(-0.5, ((6, -0.5),))]
    for read, body in ((read_completion, {"prompt": "w1", "logprobs": 1}), (read_chat, CHAT)):
        responses = Responses(read(body), "x", "model", word_tokenizer())
        text = json.dumps(responses.full([answer], ["w5 w6"]), allow_nan=False)
        assert text.count("-9999.0") == 2 and text.count("-0.5") == 2


def test_pieces_of_a_conversation() -> None:
    ask = read_chat({"messages": [{"role": "user", "content": "w1"}], "stream": True})
    responses, answer = Responses(ask, "x", "model", word_tokenizer()), answer_of([5], "stop")
    first, last = responses.first(answer), responses.last(answer)
    assert first is not None and first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    piece = responses.piece(answer, "w5", 0, 1)
    assert piece["object"] == "chat.completion.chunk" and piece["choices"][0]["delta"] == {"content": "w5"}
    assert last["choices"][0]["finish_reason"] == "stop" and piece["choices"][0]["logprobs"] is None
