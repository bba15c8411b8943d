"""Which requests a service takes, and how their tokens are chosen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from serving.counting import make_service, word_tokenizer

from paraxis.runtime.batching.request import Request
from paraxis.serving.errors import ApiError
from paraxis.serving.protocol import read_completion
from paraxis.serving.service import Answer, Service


def answers_of(service: Any, **fields: Any) -> list[Answer]:
    """The answers to a completion, which are not waited for."""

    async def start() -> list[Answer]:
        ask = read_completion({"prompt": "w5", **fields})
        service.check_open(ask)
        return service.start(ask, service.prompts_of(ask))

    return asyncio.run(start())


def test_what_a_client_does_not_say_is_the_models_own() -> None:
    service = make_service()
    try:
        (plain,) = answers_of(service, temperature=0)
        assert plain.request.choice.processors is None and not plain.request.choice.sample
        service.model.generation_config.top_k = 7
        service.model.generation_config.repetition_penalty = 1.5
        (own,) = answers_of(service, seed=3)
        names = {type(each).__name__ for each in own.request.choice.processors}
        assert names >= {"TopKLogitsWarper", "RepetitionPenaltyLogitsProcessor"}
        (said,) = answers_of(service, top_k=0, repetition_penalty=1.0, temperature=0.5, presence_penalty=1)
        names = {type(each).__name__ for each in said.request.choice.processors}
        assert "TopKLogitsWarper" not in names and names >= {"TemperatureLogitsWarper", "Penalties"}
        service.model.generation_config.temperature = 0.0
        (greedy,), (drawn,) = answers_of(service), answers_of(service, temperature=0.5)
        assert not greedy.request.choice.sample and drawn.request.choice.sample
        assert own.request.choice.generator is not None and said.request.choice.generator is None
    finally:
        service.engine.stop(abort=True)


def test_penalties_and_biases_come_before_tokens_are_ruled_out() -> None:
    service = make_service()
    try:
        (answer,) = answers_of(service, top_k=1, temperature=0.5, logit_bias={"7": 100}, seed=1)
        scores = torch.zeros(1, 64)
        scores[0, 6] = 9.0
        found = answer.request.choice.processors(torch.tensor([[5]]), scores)
        assert int(found.argmax()) == 7 and torch.isfinite(found).nonzero().tolist() == [[0, 7]]
    finally:
        service.engine.stop(abort=True)


def test_answers_to_one_prompt_have_seeds_of_their_own() -> None:
    service = make_service()
    try:
        answers = answers_of(service, n=2, seed=3, max_tokens=2)
        seeds = [answer.request.choice.generator.initial_seed() for answer in answers]
        assert seeds == [3, 4] and [answer.index for answer in answers] == [0, 1]
        assert len(service.active) == 2
        for answer in answers:
            service.release(answer)
        assert not service.active
    finally:
        service.engine.stop(abort=True)


def test_a_full_queue_is_noticed_before_the_prompt_is_read() -> None:
    service = make_service(max_batch=1, max_queue=1)
    try:
        service.active.update(Request(str(i), [1], 5) for i in range(2))
        service.tokenizer = None
        with pytest.raises(ApiError, match="room for no more") as caught:
            answers_of(service)
        assert caught.value.status == 429 and caught.value.retry_after >= 1
    finally:
        service.engine.stop(abort=True)


def test_threads_find_a_tokenizer_whose_settings_do_not_change() -> None:
    """One that was saved with truncation switches that off in its first call, and fails if it is in use."""
    service, tokenizer = make_service(), word_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    try:
        Service(service.engine, service.model, tokenizer, service.options)
        assert tokenizer.backend_tokenizer.truncation is None
    finally:
        service.engine.stop(abort=True)


def test_no_requests_are_taken_when_it_ends() -> None:
    service = make_service()
    service.engine.stop(abort=True)
    service.draining = True
    with pytest.raises(ApiError, match="shutting down"):
        answers_of(service)
    service.engine.failure = RuntimeError("gone")
    with pytest.raises(ApiError, match="has failed"):
        answers_of(service)
    assert service.state()["status"] == "failed" and "paraxis_kv_cache_usage_ratio 0" in service.render_metrics()
