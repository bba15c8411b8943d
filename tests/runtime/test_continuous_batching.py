"""Continuous batching on ranks that share a machine: the default cache fits all of them, and tokens are right."""

from __future__ import annotations

import copy
from typing import Any

import torch
from models.compare import parallel, reference
from transformers import ContinuousBatchingConfig, GenerationConfig

from paraxis.runtime import continuous_batching
from paraxis.utils.memory import available_memory

FREE = 4 * 2**30
"""What the ranks of this test take to be free."""
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [3, 4]]


def generate_with_default_sizes(folder: str, free: list[int]) -> dict[str, Any]:
    """Tokens, and the size that the user has set.

    The default is half of what is free on the rank that has less, for two ranks.
    """
    model, ctx = parallel(folder)
    continuous_batching.available_memory = lambda: free[ctx.rank]  # type: ignore[assignment]
    options = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        default = model.init_continuous_batching(options).continuous_batching_config
        sizes = [int(total * default.max_memory_percent) for total in (10**9, 10**12)]
        assert sizes == [FREE // 4] * 2, "checked before anything is allocated: it may be most of the machine's memory"
        own = ContinuousBatchingConfig(max_memory_percent=0.01)
        chosen = model.init_continuous_batching(options, own).continuous_batching_config
        answers = model.generate_batch(PROMPTS, generation_config=options)
        twin = copy.deepcopy(model)
        own_model = (
            "init_continuous_batching" in vars(twin) and twin.init_continuous_batching(options, own).model is twin
        )
    finally:
        continuous_batching.available_memory = available_memory
    return {
        "own_model": own_model,
        "own": chosen.max_memory_percent,
        "tokens": [answer.generated_tokens for answer in answers.values()],
    }


def test_default_cache_is_each_ranks_share_and_tokens_are_right(ranks: Any, checkpoints: Any) -> None:
    """The bytes do not depend on what a rank itself uses: caches of different sizes would schedule differently."""
    folder = checkpoints("llama")
    model = reference(folder)
    right = [
        model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False, eos_token_id=-1)[0, len(ids) :].tolist()
        for ids in PROMPTS
    ]
    for found in ranks(2).run(generate_with_default_sizes, folder, [2 * FREE, FREE]):
        assert found["own"] == 0.01 and found["own_model"], "a copy batches for itself"
        assert found["tokens"] == right
