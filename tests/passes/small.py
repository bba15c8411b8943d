"""A small model, planned over simulated ranks: what the tests of passes look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paraxis.plan.offline import Planned, plan_offline

VOCAB, WIDTH, INNER = 64, 16, 32


class TinyLM(nn.Module):
    """Embedding, a feed-forward block, a head and a loss, each in another way of writing it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Parameter(torch.randn(INNER, WIDTH))  # stored transposed
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        x = x + nn.functional.gelu(self.up(self.norm(x))) @ self.down
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "hidden": x}


def inputs() -> dict[str, torch.Tensor]:
    """Token ids and labels."""
    ids = torch.arange(10).view(2, 5)
    return {"ids": ids, "labels": ids.flip(1)}


@contextmanager
def planned(ranks: int = 2, rank: int = 0, **options: Any) -> Iterator[Planned]:
    """The model, planned over simulated ranks of which this process is one; markers of passes stay on the graph."""
    torch.manual_seed(0)
    options = {"example_inputs": inputs(), "clean_markers_after_all_passes": False, **options}
    try:
        with plan_offline(TinyLM(), ranks, None, options, rank=rank) as found:
            yield found
    finally:
        torch._dynamo.reset()
