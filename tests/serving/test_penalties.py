"""Penalties and biases of OpenAI's API."""

from __future__ import annotations

import torch

from paraxis.serving.penalties import Penalties


def test_generated_tokens_lose_and_biased_ones_gain() -> None:
    ids, scores = torch.tensor([[1, 1, 2, 3, 3]]), torch.zeros(1, 6)
    found = Penalties(2, presence=1.0, frequency=0.5, bias={4: 7.0})(ids, scores)
    assert found.tolist() == [[0.0, 0.0, -1.5, -2.0, 7.0, 0.0]], "tokens of the prompt do not count"
    assert Penalties(5, 0.0, 0.0, {})(ids, torch.zeros(1, 6)).sum() == 0
