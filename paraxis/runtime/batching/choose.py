"""From the logits of a step to a token for each request, on the rank that decides for all."""

from __future__ import annotations

import torch
from torch import Tensor

from .request import ERROR, LogProbs, Request


def choose(
    requests: list[Request], logits: Tensor, generator: torch.Generator | None
) -> list[tuple[int, LogProbs | None]]:
    """A token for each request from its row of logits.

    What ``generate`` of one prompt alone does: scores in float32, processors in their order, and the most likely token
    or a draw. A request whose processors fail ends with their error.
    """
    logits = logits.float()
    plain = [r.choice.processors is None and not r.choice.sample and r.choice.logprobs is None for r in requests]
    best = logits.argmax(-1).tolist() if any(plain) else []
    found: list[tuple[int, LogProbs | None]] = []
    for i, request in enumerate(requests):
        if plain[i]:
            found.append((best[i], None))
            continue
        try:
            found.append(_choose(request, logits[i : i + 1], generator))
        except Exception as error:  # of this request alone
            request.end(ERROR, f"{type(error).__name__}: {error}")
            found.append((-1, None))
    return found


def _choose(request: Request, row: Tensor, generator: torch.Generator | None) -> tuple[int, LogProbs | None]:
    choice, scores = request.choice, row
    if choice.processors is not None:
        ids = torch.tensor([request.all_tokens()], device=row.device)
        scores = choice.processors(ids, row.clone())
    if choice.sample:
        weights = torch.softmax(scores, dim=-1)
        token = int(torch.multinomial(weights, 1, generator=choice.generator or generator))
    else:
        token = int(scores.argmax(-1))
    if choice.logprobs is None:
        return token, None
    logprobs = torch.log_softmax(scores if choice.processed else row, dim=-1)[0]
    top: tuple[tuple[int, float], ...] = ()
    if choice.logprobs:
        values, ids = logprobs.topk(min(choice.logprobs, len(logprobs)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return token, LogProbs(float(logprobs[token]), top)
