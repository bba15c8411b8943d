"""From the logits of a step to its tokens, on the device: processors, greedy choice or a draw, stop tokens and strings.

The same operations in the same order as in transformers' loop, and the same draws of the same random state.
"""

from __future__ import annotations

import torch

from .decode_state import DecodeState
from .request import Request

BAD_PROBABILITIES = "probability tensor contains either `inf`, `nan` or element < 0"
"""What ``torch.multinomial`` says of scores that are not finite."""


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """``torch.multinomial(probabilities, 1).squeeze(1)``, without the checks for which the host waits."""
    exponential = torch.empty_like(probabilities).exponential_(1)
    return torch.div(probabilities, exponential, out=exponential).argmax(dim=-1)


def choose_tokens(
    request: Request, state: DecodeState, logits: torch.Tensor, ids: torch.Tensor, length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the next token of every sequence: the logits and the scores that it was chosen by.

    Args:
        request: What is asked for.
        state: What is updated.
        logits: Of the forward, for all of its rows; the last position counts.
        ids: The tokens so far, for the processors.
        length: How many tokens a sequence has with the next one, for stop strings; None if there are none.
    """
    logits = logits[: state.batch, -1].to(copy=True, dtype=torch.float32)
    scores = logits
    for processor in request.processors:
        scores = processor(ids, scores)
    if request.sample:
        probabilities = scores.softmax(dim=-1)
        state.invalid.logical_or_(~probabilities.sum().isfinite())
        tokens = draw(probabilities)
    else:
        tokens = scores.argmax(dim=-1)
    if request.pad_token is not None:
        tokens = tokens * state.unfinished + request.pad_token * (1 - state.unfinished)
    state.append(tokens)
    if request.stop_tokens is not None:
        stopped = (tokens[:, None] == request.stop_tokens).any(dim=1)
        state.unfinished.mul_(~stopped)
    for criterion in request.stop_strings:
        state.unfinished.mul_(~criterion(state.sequences[:, :length], None))
    state.signal(tokens)
    return logits, scores
