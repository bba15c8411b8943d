"""Between HTTP and the batch: which requests are taken, what each is in tokens, and what becomes of it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import torch

from ..compat.continuous_batching import processors_of, stop_tokens_of
from ..runtime.batching.engine import Engine
from ..runtime.batching.request import ERROR, Choice, Request
from ..runtime.batching.runner import longest_sequence
from .errors import ApiError, invalid
from .metrics import Metrics
from .options import ServeOptions
from .penalties import Penalties
from .protocol import MIN_TEMPERATURE, Ask
from .text import TextStream

logger = logging.getLogger("paraxis.serve")

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""What a client may say of sampling; what it does not say is taken from the model's generation configuration."""


class Answer:
    """One answer that is being generated: its request in the batch, and its text so far."""

    def __init__(self, index: int, request: Request, text: TextStream, loop: asyncio.AbstractEventLoop) -> None:
        self.index, self.request, self.text = index, request, text
        self.changed = asyncio.Event()
        self.read = 0
        self.seen = request.arrived
        self.loop = loop

    def notify(self, _: Request) -> None:
        """Called by the thread of the batch."""
        try:
            self.loop.call_soon_threadsafe(self.changed.set)
        except RuntimeError:  # the service has ended
            pass

    @property
    def reason(self) -> str:
        """Why it has ended, in OpenAI's words."""
        return "stop" if self.text.stopped or self.request.ended == "stop" else "length"


class Service:
    """Requests to one model. Rank 0 has it.

    Args:
        engine: The batch.
        model, tokenizer: What it runs.
        options: Limits.
    """

    def __init__(self, engine: Engine, model: Any, tokenizer: Any, options: ServeOptions) -> None:
        self.engine, self.model, self.tokenizer, self.options = engine, model, tokenizer, options
        self.metrics = Metrics()
        self.draining = False
        self.active: set[Request] = set()
        self.created = int(time.time())
        self.last_seconds = 1.0
        """How long the last request took: when there may be room for another one."""
        longest = longest_sequence(model.config)
        self.max_length = min(engine.capacity, longest or engine.capacity)
        self.vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        self.special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._encode("a")  # the first call may change the tokenizer's settings, which several threads must not do

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether the batch has failed, and no request can be answered any more."""
        return self.engine.failure is not None

    def state(self) -> dict[str, Any]:
        """For ``/health``."""
        status = "failed" if self.failed else "draining" if self.draining else "ok"
        running = len(self.engine.scheduler.running)
        return {
            "status": status,
            "model": self.options.name,
            "running": running,
            "waiting": max(len(self.active) - running, 0),
            "kv_cache": round(self._cache_use(), 4),
        }

    def _cache_use(self) -> float:
        pool = self.engine.scheduler.pool
        return pool.used / pool.count

    def render_metrics(self) -> str:
        """For ``/metrics``."""
        counters, state = self.engine.counters, self.state()
        return self.metrics.render(
            {
                "paraxis_requests_running": ("Requests that are computed now.", state["running"]),
                "paraxis_requests_waiting": ("Requests that wait for room in the batch.", state["waiting"]),
                "paraxis_kv_cache_usage_ratio": ("Blocks of the KV cache that are in use.", self._cache_use()),
            },
            {
                "paraxis_steps_total": ("Steps of the batch.", counters.steps),
                "paraxis_prompt_tokens_total": ("Tokens of prompts.", counters.prompt_tokens),
                "paraxis_shared_tokens_total": (
                    "Tokens of prompts that were in the KV cache already.",
                    counters.shared_tokens,
                ),
                "paraxis_generated_tokens_total": ("Tokens of answers.", counters.tokens),
                "paraxis_preemptions_total": (
                    "Requests that gave their KV cache back.",
                    self.engine.scheduler.preempted,
                ),
                "paraxis_errors_total": ("Requests that have failed in the batch.", counters.errors),
            },
        )

    # -- requests ----------------------------------------------------------------------------------------------

    def check_open(self, ask: Ask) -> None:
        """Raise if no request, or not one for this model, can be taken now."""
        if self.failed:
            raise ApiError(503, "the service has failed and ends", code="service_unavailable")
        if self.draining:
            raise ApiError(503, "the service is shutting down", code="service_unavailable", retry_after=5)
        if ask.model is not None and ask.model != self.options.name:
            raise ApiError(
                404, f"there is no model {ask.model!r} here: use {self.options.name!r}", "model", "model_not_found"
            )
        self._check_room(1)

    def _check_room(self, wanted: int) -> None:
        """Raise if so many more answers do not fit: when a request arrives, before its text becomes tokens, and when it
        is known how many it wants."""
        most = self.options.max_batch + self.options.max_queue
        if wanted > most:
            raise ApiError(400, f"{wanted} answers are more than the queue of this service holds", "n")
        if wanted > most - len(self.active):
            raise ApiError(
                429,
                f"{len(self.active)} requests are running or waiting, and there is room for no more",
                code="queue_full",
                retry_after=max(1, min(60, round(self.last_seconds))),
            )

    def prompts_of(self, ask: Ask) -> list[list[int]]:
        """The prompts in tokens."""
        if not ask.chat:
            found = [self._encode(p) if isinstance(p, str) else p for p in ask.prompts]
        else:
            found = [self._apply_template(ask)]
        for prompt in found:
            if not prompt:
                raise invalid("messages" if ask.chat else "prompt", "has no tokens")
            if max(prompt) >= self.vocabulary:
                raise invalid("prompt", f"token {max(prompt)} is not in the vocabulary of {self.vocabulary}")
            if len(prompt) >= self.max_length:
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt)} tokens, and prompt and answer together may have {self.max_length}",
                    "messages" if ask.chat else "prompt",
                    "context_length_exceeded",
                )
        return found

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer(text)["input_ids"]]

    def _apply_template(self, ask: Ask) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(
                400, "the tokenizer of this model has no chat template: use /v1/completions", "messages", "no_template"
            )
        try:
            found = self.tokenizer.apply_chat_template(
                ask.messages, tools=ask.tools, add_generation_prompt=True, tokenize=False, **ask.template
            )
        except Exception as error:  # templates raise whatever they like
            raise invalid("messages", f"the chat template refuses them: {error}") from error
        return [int(token) for token in self.tokenizer(found, add_special_tokens=False)["input_ids"]]

    def start(self, ask: Ask, prompts: list[list[int]]) -> list[Answer]:
        """Hand a client's request to the batch: n answers to each prompt."""
        self._check_room(len(prompts) * ask.n)
        loop = asyncio.get_running_loop()
        answers = [
            self._answer(ask, prompt, prompt_number * ask.n + i, i, loop)
            for prompt_number, prompt in enumerate(prompts)
            for i in range(ask.n)
        ]
        for answer in answers:
            self.active.add(answer.request)
        for answer in answers:
            self.engine.add(answer.request)
        return answers

    def _answer(self, ask: Ask, prompt: list[int], index: int, number: int, loop: asyncio.AbstractEventLoop) -> Answer:
        room = self.max_length - len(prompt)
        limit = room if ask.max_tokens is None else min(ask.max_tokens, room)
        if self.options.max_tokens is not None:
            limit = min(limit, self.options.max_tokens)
        config = self.model.generation_config
        own = stop_tokens_of(config.eos_token_id, self.model.config.eos_token_id)
        stop = frozenset(ask.stop_tokens) | (frozenset() if ask.ignore_eos else own)
        choice = Choice(
            self._processors(ask, prompt),
            self._samples(ask),
            None if ask.seed is None else torch.Generator(self.engine.runner.device).manual_seed(ask.seed + number),
            ask.logprobs,
        )
        request = Request(uuid.uuid4().hex, prompt, limit, stop, choice)
        answer = Answer(index, request, TextStream(self.tokenizer, ask.stop), loop)
        request.on_change = answer.notify
        return answer

    def _samples(self, ask: Ask) -> bool:
        """Whether tokens are drawn: not with a temperature of zero, the client's or the model's own."""
        temperature = ask.sampling.get("temperature", getattr(self.model.generation_config, "temperature", None))
        return bool(ask.sampling["do_sample"]) and (temperature is None or temperature >= MIN_TEMPERATURE)

    def _processors(self, ask: Ask, prompt: list[int]) -> Any:
        """What changes the scores: what ``generate`` would use, and what OpenAI's API has beside."""
        from transformers import GenerationConfig, LogitsProcessorList

        own, sample = self.model.generation_config, self._samples(ask)
        chosen = {name: ask.sampling.get(name, getattr(own, name, None)) for name in SAMPLING if sample}
        if sample:
            neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
            chosen |= {name: value for name, value in neutral.items() if chosen[name] is None}
        for name in ("repetition_penalty", "min_new_tokens"):
            if name in ask.sampling:
                chosen[name] = ask.sampling[name]
        config = GenerationConfig(do_sample=sample, eos_token_id=own.eos_token_id, **chosen)
        found = list(processors_of(self.model, config, prompt, self.engine.runner.device) or ())
        if any(ask.penalties) or ask.bias:
            if any(token >= self.vocabulary for token in ask.bias):
                raise invalid("logit_bias", f"has a token that is not in the vocabulary of {self.vocabulary}")
            found.insert(0, Penalties(len(prompt), *ask.penalties, ask.bias))  # before any token is ruled out
        return LogitsProcessorList(found) if found else None

    # -- answers -----------------------------------------------------------------------------------------------

    async def pieces(self, answer: Answer, deadline: float) -> AsyncIterator[tuple[str, list[int]]]:
        """(new text, new tokens) of an answer as they come, until it ends."""
        request, loop = answer.request, asyncio.get_running_loop()
        try:
            while True:
                ended = bool(request.ended)
                tokens = request.tokens[answer.read :]
                answer.read += len(tokens)
                self._note_tokens(answer, len(tokens))
                visible = [x for x in tokens if not (x in request.stop_tokens and x not in self.special)]
                piece = answer.text.add(visible)
                if ended and not answer.text.stopped:
                    piece += answer.text.finish()
                if piece or tokens:
                    yield piece, tokens
                if answer.text.stopped or ended:
                    break
                left = deadline - loop.time()
                if left <= 0:
                    raise ApiError(504, f"not done within {self.options.timeout:g} s", code="timeout")
                try:
                    await asyncio.wait_for(answer.changed.wait(), left)
                except asyncio.TimeoutError:
                    continue
                answer.changed.clear()
            if request.ended == ERROR:
                raise ApiError(503 if self.failed or self.draining else 500, request.error, code="generation_failed")
        finally:
            self.release(answer)

    def release(self, answer: Answer) -> None:
        """An answer has ended, or nobody waits for it: its place in the batch is free."""
        if answer.request not in self.active:
            return
        self.active.discard(answer.request)
        if not answer.request.ended:
            self.engine.cancel(answer.request)
        self.last_seconds = time.perf_counter() - answer.request.arrived

    def _note_tokens(self, answer: Answer, count: int) -> None:
        if not count:
            return
        now, first = time.perf_counter(), answer.seen == answer.request.arrived
        if first and answer.request.started > 0:
            self.metrics.queued.add(answer.request.started - answer.request.arrived)
        self.metrics.token(now - answer.seen, first)
        for _ in range(count - 1):
            self.metrics.token(0.0, False)
        answer.seen = now
