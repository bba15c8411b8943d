"""Changes of scores that OpenAI's API has and ``generate`` does not."""

from __future__ import annotations

import torch
from torch import Tensor


class Penalties:
    """Lower the scores of tokens that were generated before, and add to those of chosen tokens.

    Args:
        prompt: Tokens of the prompt, which do not count.
        presence: What a token loses if it was generated.
        frequency: What it loses each time it was.
        bias: What is added to the scores of tokens.
    """

    def __init__(self, prompt: int, presence: float, frequency: float, bias: dict[int, float]) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency
        self.bias = torch.tensor(list(bias)), torch.tensor(list(bias.values()))

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """As a logits processor is called, which may change the scores in place."""
        if self.presence or self.frequency:
            counts = torch.bincount(ids[0, self.prompt :], minlength=scores.shape[-1])[: scores.shape[-1]]
            scores -= self.frequency * counts + self.presence * (counts > 0)
        tokens, amounts = self.bias
        if len(tokens):
            scores[0, tokens.to(scores.device)] += amounts.to(scores)
        return scores
