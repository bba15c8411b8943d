"""A request of a batch: its prompt, how its tokens are chosen, and how far it has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

STOP, LENGTH, CANCELLED, ERROR = "stop", "length", "cancelled", "error"
"""Why a request has ended."""


@dataclass(eq=False)
class Choice:
    """How the tokens of a request are chosen.

    Attributes:
        processors: What changes the scores, called with the tokens so far as in ``generate``; None for nothing.
        sample: Whether tokens are drawn.
        generator: What they are drawn with; None for the generator of the batch.
        logprobs: How many of the most likely tokens to report besides the chosen one; None for no log-probabilities.
        processed: Whether log-probabilities are those of processed scores, and not of the logits.
    """

    processors: Any = None
    sample: bool = False
    generator: torch.Generator | None = None
    logprobs: int | None = None
    processed: bool = False


@dataclass(frozen=True)
class LogProbs:
    """The log-probability of a chosen token, and (token, log-probability) of the most likely ones."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Request:
    """A request.

    Attributes:
        name: Its id.
        prompt: Token ids.
        max_new_tokens: How many tokens it gets at most.
        stop_tokens: It ends with one of these.
        choice: How its tokens are chosen.
        on_change: Called, by the thread that runs the steps, after each new token and at the end.
        tokens: What it got so far.
        logprobs: For each of the tokens, if asked for.
        computed: How many of its positions are in the KV cache.
        blocks: Where these are.
        shared: How many positions of its prompt were in the KV cache already.
        ended: Why it has ended; empty before.
        error: What went wrong.
        cancelled: Whether somebody does not want it any more.
    """

    name: str
    prompt: list[int]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    choice: Choice = field(default_factory=Choice)
    on_change: Callable[[Request], None] | None = None
    details: Any = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    shared: int = 0
    ended: str = ""
    error: str = ""
    cancelled: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    started: float = -1.0
    first_token: float = -1.0
    finished: float = -1.0

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def pending(self) -> int:
        """How many tokens are to be computed until there is a new one."""
        return self.length - self.computed

    def all_tokens(self) -> list[int]:
        """The prompt and the answer."""
        return self.prompt + self.tokens

    def next_tokens(self, count: int) -> list[int]:
        """The next tokens to compute."""
        at = self.computed - len(self.prompt)
        return self.tokens[at : at + count] if at >= 0 else self.all_tokens()[self.computed : self.computed + count]

    def add(self, token: int, logprobs: LogProbs | None) -> None:
        """A new token. Whoever sees it, in another thread, finds its log-probability too."""
        if not self.tokens:
            self.first_token = time.perf_counter()
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.tokens.append(token)
        if token in self.stop_tokens:
            self.end(STOP)
        elif len(self.tokens) >= self.max_new_tokens:
            self.end(LENGTH)

    def end(self, reason: str, error: str = "") -> None:
        """It has ended. Whoever sees that, in another thread, finds the error too."""
        self.error, self.finished = error, time.perf_counter()
        self.ended = reason
