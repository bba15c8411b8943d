"""Look-ups in tables that are computed or sharded by their rows: by index, gather, embedding, one-hot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.compare import gradient_errors, max_difference, parallel_module
from torch import nn

ROWS, WIDTH = 48, 16


class Lookups(nn.Module):
    """The weight of a vocab-parallel head is looked up in every way that models have, and so are its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        hidden = hidden + self.down(self.up(hidden).relu())
        table, logits = self.head.weight, self.head(hidden)
        rows = torch.arange(ids.shape[0])[:, None]
        return {
            "index": table[ids],
            "from the end": table[ids - ROWS],
            "mask": logits[..., torch.arange(ROWS) % 3 == 0],
            "index_select": table.index_select(0, ids.flatten()),
            "rows one by one": torch.stack([table[i] for i in ids.unbind(-1)], 1),
            "embedding": F.embedding(ids, table),
            "embedding with gradients by frequency": F.embedding(ids, table, scale_grad_by_freq=True),
            "embedding of a computed table": F.embedding(ids, table.tanh()),
            "embedding of layers' results": F.embedding(ids, self.down(self.up(table))),
            "computed": self.up(self.embed.weight)[ids],
            "one-hot": F.one_hot(ids, ROWS).to(table.dtype) @ table,
            "one-hot of logits": (F.one_hot(ids, ROWS) * logits).sum(-1),
            "gather": logits.log_softmax(-1).gather(-1, ids[..., None]),
            "take_along_dim": logits.take_along_dim(ids[..., None], -1),
            "advanced": logits[rows, torch.arange(ids.shape[1])[None], ids],
            "columns": logits[..., ids[0]],
            "rows of the best": table[logits.topk(3, -1).indices],
            "scatter": torch.zeros_like(logits).scatter(-1, ids[..., None], 1.0) * logits,
            "index_add": table.index_add(0, ids.flatten(), hidden.flatten(0, 1)),
            "flipped": table.flip(0)[ids],
        }


def look_up(constraints: dict[str, str] | None, compile: str | None) -> dict[str, Any]:
    """Errors of each result, for two kinds of shapes, and of the gradients; the placement of the tables."""
    torch._dynamo.reset()
    ids, others = (
        torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(1)) for shape in ((2, 6), (3, 5))
    )
    model, unsharded, ctx = parallel_module(Lookups, ids, constraints=constraints, compile=compile)
    results, expected = model(ids), unsharded(ids)
    errors = {name: max_difference(results[name], expected[name]) for name in expected}
    for tensors in (results, expected):
        sum(tensor.square().mean() for tensor in tensors.values()).backward()
    with torch.no_grad():
        results, expected = model(others), unsharded(others)
    errors |= {f"{name} without gradients": max_difference(results[name], expected[name]) for name in expected}
    return {
        "errors": errors,
        "gradients": max(gradient_errors(model, unsharded).values()),
        "head": tuple(model.head.weight.to_local().shape),
        "breaks": ctx.plan.breaks,
    }


BY_ROWS = {"head.weight": "shard(0)", "embed.weight": "shard(0)"}


@pytest.mark.parametrize(
    ("constraints", "compile"),
    [(None, None), (BY_ROWS, None), (BY_ROWS, "inductor"), pytest.param(None, "inductor", marks=pytest.mark.long)],
)
def test_results_equal_the_unsharded_ones(ranks: Any, constraints: dict[str, str] | None, compile: str | None) -> None:
    for found in ranks(2).run(look_up, constraints, compile, timeout=600):
        wrong = {name: error for name, error in found["errors"].items() if not error < 1e-4}
        assert not wrong and found["gradients"] < 1e-3
        assert found["breaks"] == ()
        if constraints is not None:
            assert found["head"] == (ROWS // 2, WIDTH)
