"""Requests of OpenAI's API: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from paraxis.serving.errors import ApiError
from paraxis.serving.protocol import read_chat, read_completion

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def test_a_conversation_is_read() -> None:
    ask = read_chat(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
                {"role": "user", "content": "hello"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "max_completion_tokens": 5,
            "n": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": ["a", "b"],
            "seed": 3,
            "logprobs": True,
            "top_logprobs": 4,
            "temperature": 0,
            "presence_penalty": 0.5,
            "logit_bias": {"7": -100},
            "user": "somebody",
        }
    )
    assert ask.chat and ask.messages[0]["content"] == "be kind" and ask.tools and ask.max_tokens == 5
    assert (ask.n, ask.stream, ask.usage_chunk, ask.stop, ask.seed, ask.logprobs) == (2, True, True, ("a", "b"), 3, 4)
    assert not ask.sampling["do_sample"] and ask.penalties == (0.5, 0.0) and ask.bias == {7: -100.0}


def test_a_completion_is_read() -> None:
    ask = read_completion({"prompt": "hello"})
    assert ask.prompts == ["hello"] and ask.max_tokens == 16 and ask.logprobs is None
    assert ask.sampling == {"do_sample": True}, "what the client does not say is the model's own"
    assert read_completion({"prompt": [1, 2]}).prompts == [[1, 2]]
    assert read_completion({"prompt": [[1], [2]]}).prompts == [[1], [2]]
    assert read_completion({"prompt": ["a", "b"], "top_p": 0}).sampling == {"do_sample": False, "top_p": 0.0}
    assert not read_completion({"prompt": "a", "temperature": 1e-30}).sampling["do_sample"], "scores would be infinite"
    sampling = read_completion({"prompt": "a", "temperature": 0.5, "top_k": -1, "min_tokens": 2}).sampling
    assert sampling == {"do_sample": True, "temperature": 0.5, "top_k": 0, "min_new_tokens": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'; this service takes text"),
        ({"response_format": {"type": "json_object"}}, "does not force another format"),
        ({"tool_choice": "required"}, "cannot be forced"),
        ({"tools": ["x"]}, "objects with a function"),
        ({"top_logprobs": 2}, "needs logprobs: true"),
        ({"temperature": -1}, "not between"),
        ({"n": 17}, "not between 1 and 16"),
        ({"logit_bias": {"a": 1}}, "from token ids"),
        ({"stop_token_ids": [-1]}, "list of token ids"),
        ({"chat_template_kwargs": 1}, "must be an object"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template cannot be set by a client"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize cannot be set by a client"),
        ({"logit_bias": {"9" * 5000: 1}}, "from token ids"),
        ({"temperature": 10**400}, "temperature: is not between 0 and 10"),
        ({"model": 1}, "must be a text"),
        ({"strange": 1}, "unknown field: strange"),
    ],
)
def test_what_is_wrong_with_a_conversation_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        read_chat({**HELLO, **fields})
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "prompt: must be"),
        ({"prompt": [True]}, "prompt: must be"),
        ({"suffix": "x"}, "does not insert text"),
        ({"best_of": 3}, "does not rank answers"),
        ({"echo": True, "logprobs": 1}, "not together"),
        ({"repetition_penalty": 0}, "repetition_penalty: is not between 0.01 and 10"),
    ],
)
def test_what_is_wrong_with_a_completion_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        read_completion({"prompt": "a", **fields})
