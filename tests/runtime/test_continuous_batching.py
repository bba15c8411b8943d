"""Continuous batching on ranks: requests of mixed lengths get the unsharded model's tokens."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models.compare import parallel, reference
from transformers import ContinuousBatchingConfig, GenerationConfig

from paraxis.config import Config
from paraxis.runtime import continuous_batching
from paraxis.runtime.batching.request import CANCELLED, LENGTH, Request
from paraxis.runtime.continuous_batching import BatchingManager, cache_bytes, parallel_batching, refuse_options
from paraxis.utils.memory import available_memory

FREE = 4 * 2**30
"""What the ranks of this test take to be free."""
EOS = 7


def prompts_of(count: int, longest: int = 24) -> list[list[int]]:
    """Random prompts, of which half begin with the same tokens."""
    draw = random.Random(0)
    prefix = [draw.randrange(3, 200) for _ in range(10)]
    found = []
    for i in range(count):
        own = [draw.randrange(3, 200) for _ in range(draw.randrange(1, longest - 10))]
        found.append([*prefix, *own] if i % 2 else own)
    return found


def generated(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """What a model generates for each prompt alone."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        found.append(answer[0, len(prompt) :].tolist())
    return found


def batch_in_several_ways(folder: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Tokens: at default sizes; with chunked prefills, few blocks and shared prefixes; and drawn ones."""
    model, ctx = parallel(folder)
    continuous_batching.available_memory = lambda: FREE + ctx.rank  # type: ignore[assignment]
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=EOS, pad_token_id=0)
    found: dict[str, Any] = {}
    try:
        found["bytes"] = cache_bytes(ctx)
        default = model.generate_batch(prompts, generation_config=greedy)
        found["default"] = [answer.generated_tokens for answer in default.values()]
        programs = ctx.compile_times
        small = ContinuousBatchingConfig(page_size=4, num_blocks=16, max_batch_tokens=16, max_requests_per_batch=6)
        manager = model.init_continuous_batching(greedy, small)
        manager.start()
        names = manager.add_requests(prompts)
        results = {}
        while len(results) < len(prompts):
            result = manager.get_result(timeout=60)
            assert result is not None and result.error is None, result
            results[result.request_id] = result.generated_tokens
        found["small"] = [results[name] for name in names]
        if manager.is_tp_driver:
            found["preempted"] = manager.engine.scheduler.preempted
            found["shared"] = manager.engine.counters.shared_tokens
            found["left"] = manager.engine.scheduler.pool.used
        manager.stop()
        manager.destroy()
        found["programs"] = ctx.compile_times - programs
        found["breaks"] = ctx.plan.breaks
        drawn = GenerationConfig(max_new_tokens=6, do_sample=True, temperature=0.8, top_k=5, eos_token_id=EOS)
        config = ContinuousBatchingConfig(seed=3, return_logprobs=True)
        answers = model.generate_batch(prompts[:3], generation_config=drawn, continuous_batching_config=config)
        found["drawn"] = [(answer.generated_tokens, answer.logprobs) for answer in answers.values()]
        ids = torch.tensor([prompts[0]])
        found["alone"] = model.generate(ids, generation_config=greedy)[0, len(prompts[0]) :].tolist()
    finally:
        continuous_batching.available_memory = available_memory
    return found


def test_tokens_are_those_of_one_request_at_a_time(ranks: Any, checkpoints: Any) -> None:
    """At default sizes, and in steps and a cache so small that prefills are chunked and requests computed again."""
    folder, prompts, new = checkpoints("llama"), prompts_of(12), 8
    right = generated(reference(folder), prompts, max_new_tokens=new, do_sample=False, eos_token_id=EOS)
    both = ranks(2).run(batch_in_several_ways, folder, prompts, new)
    for found in both:
        assert found["default"] == right
        assert found["small"] == right
        assert found["alone"] == right[0], "generate still works, and so does its own attention"
        assert found["programs"] == 0, "one program serves all sizes"
        assert found["breaks"] == ()
        assert found["bytes"] == FREE // 4
    first, second = both
    assert first["drawn"] == second["drawn"]
    assert all(logprob <= 0 for _, logprobs in first["drawn"] for logprob in logprobs)
    assert first["preempted"] and first["shared"], "the test is about both"
    assert not first["left"], "all blocks are free again"


def batch_many(folder: str, prompts: list[list[int]], limits: list[int], sharing: bool) -> list[list[int]]:
    """Tokens of requests with limits of their own."""
    model, _ = parallel(folder)
    options = GenerationConfig(do_sample=False, eos_token_id=EOS, pad_token_id=0)
    config = ContinuousBatchingConfig(
        page_size=4, num_blocks=80, max_batch_tokens=64, max_requests_per_batch=24, allow_block_sharing=sharing
    )
    manager = model.init_continuous_batching(options, config)
    manager.start()
    names = [f"own_{i}" for i in range(len(prompts))]
    for name, prompt, limit in zip(names, prompts, limits, strict=True):
        manager.add_request(prompt, request_id=name, max_new_tokens=limit)
    found: dict[str, list[int]] = {}
    while len(found) < len(prompts):
        result = manager.get_result(timeout=60)
        assert result is not None and result.error is None, result
        found[result.request_id] = result.generated_tokens
    manager.stop()
    manager.destroy()
    return [found[name] for name in names]


@pytest.mark.long
@pytest.mark.parametrize("sharing", [True, False])
def test_two_hundred_requests_of_random_lengths(ranks: Any, checkpoints: Any, sharing: bool) -> None:
    """They end at limits of their own, or at a stop token."""
    folder, prompts, draw = checkpoints("llama"), prompts_of(200), random.Random(2)
    limits = [draw.randrange(1, 30) for _ in prompts]
    model = reference(folder)
    right = [
        generated(model, [prompt], max_new_tokens=limit, do_sample=False, eos_token_id=EOS)[0]
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    for found in ranks(2).run(batch_many, folder, prompts, limits, sharing, timeout=600):
        assert found == right


def test_options_that_mean_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match="cpu_offload_space"):
        refuse_options(ContinuousBatchingConfig(cpu_offload_space=1.0))
    with pytest.raises(ValueError, match="scheduler_type='other'"):
        refuse_options(ContinuousBatchingConfig(scheduler_type="other"))
    refuse_options(ContinuousBatchingConfig(scheduler_type="prefill_first"))


def test_ranks_that_shard_parameters_are_refused() -> None:
    """They gather them together in every step, and would wait for one another."""
    ctx: Any = SimpleNamespace(dp_size=2)
    init = parallel_batching(object(), ctx, Config(data_parallel="shard"))
    with pytest.raises(NotImplementedError, match="data_parallel='replicate'"):
        init()


def start_cancel_stop(folder: str) -> dict[str, Any]:
    """A request that is cancelled leaves its blocks; one that streams is seen token by token on every rank."""
    model, _ = parallel(folder)
    config = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(config, ContinuousBatchingConfig(page_size=4, num_blocks=64))
    manager.start()
    seen: list[int] = []
    manager.add_request([5, 6, 7], request_id="watched", streaming=True, max_new_tokens=12)
    manager.add_request([8, 9], request_id="cancelled", streaming=True)
    for result in manager.request_id_iter("watched"):
        seen.append(len(result.generated_tokens))
        if len(seen) == 3:
            manager.cancel_request("cancelled")
    left = 0
    if manager.is_tp_driver:
        deadline = threading.Event()
        while manager.engine.scheduler.pool.used and not deadline.wait(0.1):
            left += 1
            assert left < 600
    manager.stop()
    running = manager.is_running()
    manager.destroy()
    return {"seen": seen, "running": running}


def test_a_request_can_be_cancelled_and_watched(ranks: Any, checkpoints: Any) -> None:
    for found in ranks(2).run(start_cancel_stop, checkpoints("llama")):
        assert found["seen"] == sorted(found["seen"]) and found["seen"][-1] == 12
        assert not found["running"]


def test_answers_that_are_left_can_be_cancelled_when_one_has_ended() -> None:
    """Of one request with several answers; a request that is cancelled is forgotten, with its handler."""
    requests = [Request(name, [1], 5, details=("a", False, None)) for name in ("a", "a__child#1")]
    manager: Any = SimpleNamespace(
        engine=SimpleNamespace(cancel=lambda request: request.end(CANCELLED)),
        channel=SimpleNamespace(alone=True),
        _requests={"a": requests},
        _handlers={"a__child#1": None},
        _lock=threading.Lock(),
        _deliver=lambda _: None,
    )
    requests[0].end(LENGTH)
    BatchingManager._changed(manager, requests[0])
    BatchingManager.cancel_request(manager, "a")
    assert requests[1].ended == CANCELLED
    BatchingManager._changed(manager, requests[1])
    assert not manager._requests and not manager._handlers


def batch_of_uneven_heads(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens on ranks that have different numbers of KV heads."""
    model, _ = parallel(folder)
    options = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(page_size=4, num_blocks=64)
    found = model.generate_batch(prompts, generation_config=options, continuous_batching_config=config)
    return [answer.generated_tokens for answer in found.values()]


def test_kv_heads_that_do_not_divide(ranks: Any, checkpoints: Any) -> None:
    """Four KV heads on three ranks."""
    folder, prompts = checkpoints("llama"), prompts_of(4)
    right = generated(reference(folder), prompts, max_new_tokens=6, do_sample=False, eos_token_id=-1)
    assert ranks(3).run(batch_of_uneven_heads, folder, prompts) == [right] * 3
