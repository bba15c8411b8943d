"""Compiling ahead of the first request."""

from __future__ import annotations

import time
from typing import Any

import torch


@torch.no_grad()
def warm_up(
    model: Any, *, batch_size: int = 1, prompt_length: int = 16, new_tokens: int = 4, **generate_options: Any
) -> float:
    """Generate from made-up prompts, so that what a later ``generate`` needs is compiled; the seconds it took.

    Two lengths are tried: with the second one torch learns that the length varies, and from then on prompts of any
    length use the same program. A batch of another size, another kind of cache or beams are programs of their own: call
    it again with these as ``generate_options``. With caches of a fixed size and CUDA graphs, prompts are recorded for
    their exact length.

    Every rank must call it, as it must call ``generate``.

    Args:
        model: What :func:`paraxis.parallelize_model` returned, with a ``generate`` method.
        batch_size: As in the calls to come.
        prompt_length: The shorter of the two prompts.
        new_tokens: How many tokens to generate: at least 3, for the program of a token with a cache that grows.
        generate_options: For ``model.generate``, such as ``cache_implementation="static"``.
    """
    if not hasattr(model, "generate"):
        raise TypeError(f"{type(model).__name__} does not generate; call it once with inputs as they will come instead")
    if new_tokens < 3:
        raise ValueError(f"new_tokens={new_tokens}: at least 3, so that a token is computed twice with a cache")
    started = time.perf_counter()
    device = next(model.parameters()).device
    options = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens, **generate_options}
    main_input = getattr(model, "main_input_name", "input_ids")
    if main_input != "input_ids":
        raise TypeError(
            f"{type(model).__name__} generates from {main_input}: there are no dummy inputs for it; call generate once"
        )
    for length in (prompt_length, prompt_length + 7):
        ids = torch.ones(batch_size, length, dtype=torch.int64, device=device)
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return time.perf_counter() - started
