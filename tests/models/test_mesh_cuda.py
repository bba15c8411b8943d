"""A mesh of 2 × 2 gloo ranks that share one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.meshes import batches, parallel_on_mesh, rows_of_rank, train_against_unsharded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_training_follows_the_unsharded_model(ranks: Any, checkpoints: Any, name: str, data_parallel: str) -> None:
    options = {"count": 9, "device": "cuda:0", "timeout": 200}
    for found in ranks(4).run(train_against_unsharded, checkpoints(name), 2, 2, data_parallel, **options):
        assert found["losses"] < 1e-4 and found["parameters"] < 1e-3, found
        assert found["placed"] and found["fraction"] < (0.27 if data_parallel == "shard" else 0.53)


def measure_memory(folder: str, data_parallel: str) -> tuple[float, float]:
    """What a rank holds after a step of AdamW and the peak of the next step above it, over the size of all weights."""
    empty = torch.cuda.memory_allocated()
    model, ctx = parallel_on_mesh(folder, 2, 2, "cuda:0", data_parallel=data_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = rows_of_rank(batches(1)[0], ctx).cuda()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return (before - empty) / weights, peak / weights


def test_sharded_states_take_a_quarter_of_the_memory(ranks: Any, checkpoints: Any) -> None:
    """Parameters, gradients and AdamW's states are four times the weights; few weights are unsharded at a time."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 2048}
    folder = checkpoints("llama", **sizes)
    for states, step in ranks(4).run(measure_memory, folder, "replicate", timeout=200):
        assert states == pytest.approx(4 / 2, rel=0.15), step
    for states, step in ranks(4).run(measure_memory, folder, "shard", timeout=200):
        assert states == pytest.approx(4 / 4, rel=0.15) and step < 0.25, (states, step)
