"""Answers in the form of OpenAI's API: at once, or in pieces."""

from __future__ import annotations

import time
from typing import Any

from .protocol import Ask
from .service import Answer

IMPOSSIBLE = -9999.0
"""The least log-probability that a client gets."""


class Responses:
    """The responses to one request of a client.

    Args:
        ask: What it asks for.
        identity: The id of the response.
        model: The name of the model.
        tokenizer: Says what a token is as text.
    """

    def __init__(self, ask: Ask, identity: str, model: str, tokenizer: Any) -> None:
        self.ask, self.tokenizer = ask, tokenizer
        self.kind = "chat.completion" if ask.chat else "text_completion"
        self.identity = f"{'chatcmpl' if ask.chat else 'cmpl'}-{identity}"
        self.created, self.model = int(time.time()), model

    def full(self, answers: list[Answer], texts: list[str]) -> dict[str, Any]:
        """The response with all answers."""
        choices = [self._choice(answer, text) for answer, text in zip(answers, texts, strict=True)]
        return self._object(self.kind, choices) | {"usage": usage(answers, self.ask)}

    def first(self, answer: Answer) -> dict[str, Any] | None:
        """What a stream begins with: the role, in a conversation; a prompt that is to be echoed."""
        if self.ask.chat:
            return self._piece(answer, {"role": "assistant", "content": ""}, None, None)
        if self.ask.echo:
            return self._piece(answer, self._prompt(answer), None, None)
        return None

    def piece(self, answer: Answer, text: str, start: int, count: int) -> dict[str, Any]:
        """A piece of a stream: new text, of tokens from ``start`` on."""
        logprobs = self._logprobs(answer, start, start + count)
        return self._piece(answer, {"content": text} if self.ask.chat else text, None, logprobs)

    def last(self, answer: Answer) -> dict[str, Any]:
        """The end of an answer in a stream."""
        return self._piece(answer, {} if self.ask.chat else "", answer.reason, None)

    def usage(self, answers: list[Answer]) -> dict[str, Any]:
        """The last piece of a stream whose client wants the usage."""
        return self._object(self._piece_kind, []) | {"usage": usage(answers, self.ask)}

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self.ask.chat else "text_completion"

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, answer: Answer, text: str) -> dict[str, Any]:
        common = {
            "index": answer.index,
            "finish_reason": answer.reason,
            "logprobs": self._logprobs(answer, 0, len(answer.text.tokens)),
        }
        if self.ask.chat:
            return common | {"message": {"role": "assistant", "content": text}}
        return common | {"text": (self._prompt(answer) if self.ask.echo else "") + text}

    def _piece(self, answer: Answer, content: Any, reason: str | None, logprobs: Any) -> dict[str, Any]:
        field = "delta" if self.ask.chat else "text"
        choice = {"index": answer.index, field: content, "finish_reason": reason, "logprobs": logprobs}
        return self._object(self._piece_kind, [choice])

    def _prompt(self, answer: Answer) -> str:
        return answer.text.decode(answer.request.prompt)

    def _token(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def _logprobs(self, answer: Answer, start: int, end: int) -> dict[str, Any] | None:
        if self.ask.logprobs is None or end <= start:
            return None
        tokens = answer.text.tokens[start:end]
        known = answer.request.logprobs[start:end]
        if self.ask.chat:
            content = [
                self._entry(token, each.chosen) | {"top_logprobs": [self._entry(*pair) for pair in each.top]}
                for token, each in zip(tokens, known, strict=True)
            ]
            return {"content": content, "refusal": None}
        texts = [self._token(token) for token in tokens]
        offset = len(self._prompt(answer)) if self.ask.echo else 0
        return {
            "tokens": texts,
            "token_logprobs": [finite(each.chosen) for each in known],
            "top_logprobs": [{self._token(t): finite(value) for t, value in each.top} for each in known],
            "text_offset": [offset + at for at in answer.text.offsets[start:end]],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def finite(logprob: float) -> float:
    """A log-probability as JSON can have it: OpenAI's number for a token that is impossible, or has none."""
    return logprob if logprob > IMPOSSIBLE else IMPOSSIBLE


def usage(answers: list[Answer], ask: Ask) -> dict[str, Any]:
    """Tokens of prompts, each counted once, and of answers."""
    prompt = sum(len(answer.request.prompt) for answer in answers[:: ask.n])
    shared = sum(answer.request.shared for answer in answers[:: ask.n])
    completion = sum(answer.read for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": shared},
    }
