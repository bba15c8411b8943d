"""Private and version-dependent APIs of transformers' continuous batching: what a request's result is, and how scores
are processed. Seen on transformers 5.22."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = [
    "CACHED_MANAGER",
    "generation_output",
    "is_stateful",
    "new_batching_config",
    "page_size_of",
    "processors_of",
    "stop_tokens_of",
]

CACHED_MANAGER = "_cached_continuous_batching_manager"
"""The attribute of a model that holds a manager made with ``persistent_manager=True``."""


def is_stateful(model: Any) -> bool:
    """Whether a model has a state that is no KV cache, as state-space models have."""
    return bool(getattr(model, "_is_stateful", False))


def new_batching_config() -> Any:
    """The configuration that continuous batching has by default."""
    from transformers import ContinuousBatchingConfig

    return ContinuousBatchingConfig()


def page_size_of(config: Any) -> int:
    """How many positions a block of the KV cache has; earlier versions call it ``block_size``."""
    return int(config.page_size if hasattr(config, "page_size") else config.block_size)


def generation_output(
    name: str, prompt: list[int], tokens: list[int], logprobs: list[float], ended: bool, error: str, times: Any
) -> Any:
    """What a manager of continuous batching hands out; ``times``: (arrived, started, finished) of the request, and of
    each of its tokens, or None."""
    from transformers.generation.continuous_batching import RequestStatus
    from transformers.generation.continuous_batching.requests import GenerationOutput

    status = RequestStatus.FAILED if error else RequestStatus.FINISHED if ended else RequestStatus.DECODING
    (arrived, started, finished), stamps = times
    return GenerationOutput(
        request_id=name,
        prompt_ids=prompt,
        generated_tokens=tokens,
        logprobs=logprobs,
        error=error or None,
        status=status,
        created_time=arrived,
        lifespan=(started, finished),
        timestamps=stamps,
    )


def stop_tokens_of(*values: Any) -> frozenset[int]:
    """The first of these values of ``eos_token_id`` that is set, as a set of tokens."""
    for value in values:
        if value is not None:
            found = [value] if isinstance(value, int) else list(value)
            return frozenset(int(token) for token in found if int(token) >= 0)
    return frozenset()


def processors_of(model: Any, generation_config: Any, prompt: list[int], device: torch.device) -> Any:
    """The processors that ``generate`` applies to the scores of a prompt with this configuration; None if there are
    none."""
    config = copy.deepcopy(generation_config)
    ids = torch.tensor([prompt], device=device)
    prepared, _ = model._prepare_generation_config(config)
    model._prepare_special_tokens(prepared, True, device=device)
    found = model._get_logits_processor(
        prepared, input_ids_seq_length=len(prompt), encoder_input_ids=ids, device=device, model_kwargs={}
    )
    return found if len(found) else None
